"""The bookkeeping of SlotEnv, on probe/host-line: x moves by a / 10, ends above 0.95, is cut after `horizon` steps."""

import numpy as np
import pytest

import envs
from envs.types import ArraySpec

ALL = np.ones(2, bool)


def line(horizon=20):
    env = envs.make(f'probe/host-line:horizon={horizon}', num_envs=2)
    env.reset(np.array([0, 1]), ALL)
    return env


def place(env, *positions):
    state = env.get_state()
    state['simulation/positions'][:] = positions
    env.set_state(state)


def test_one_step_by_hand():
    env = line()
    place(env, -0.5, 0.2)
    step = env.step(np.array([[1.0], [-0.5]], np.float32), ALL)
    # -0.5 + 0.1 = -0.4 with reward -1.4; 0.2 - 0.05 = 0.15 with reward -0.85.
    np.testing.assert_allclose(step.observations, [[-0.4], [0.15]], atol=1e-6)
    np.testing.assert_allclose(step.rewards, [-1.4, -0.85], atol=1e-6)
    assert step.masks.tolist() == [1, 1]
    assert step.truncations.tolist() == [0, 0]
    assert {str(values.dtype) for values in (*step[:4], step.metrics['success'])} == {'float32'}


def test_true_end_and_time_limit_are_told_apart():
    env = line(horizon=2)
    place(env, 0.8, 0.8)
    actions = np.array([[1.0], [0.0]], np.float32)
    env.step(actions, ALL)
    step = env.step(actions, ALL)  # 0.8 -> 0.9 -> 1.0 ends truly, on the last permitted step; 0.8 is cut
    assert step.masks.tolist() == [0, 1]
    assert step.truncations.tolist() == [0, 1]
    assert step.metrics['success'].tolist() == [1, 0]
    with pytest.raises(ValueError, match=r'slots \[0, 1\] have no running episode'):
        env.step(actions, ALL)


def test_inactive_slots_repeat_their_last_result():
    env = line()
    before = env.step(np.ones((2, 1), np.float32), ALL)
    step = env.step(np.array([[np.nan], [1.0]], np.float32), np.array([False, True]))  # rows of inactive slots are ignored
    assert step.observations[0] == before.observations[0]
    assert step.rewards[0] == before.rewards[0]
    assert step.observations[1] != before.observations[1]
    observations = env.reset(np.array([-1, 7]), np.array([False, True]))  # so are their seeds
    assert observations[0] == before.observations[0]
    step = env.step(np.ones((2, 1), np.float32), np.zeros(2, bool))
    assert step.observations[1] == observations[1]
    assert (step.rewards[1], step.masks[1], step.truncations[1]) == (0, 1, 0)


def test_results_are_not_views_that_change_later():
    env = line()
    first = env.step(np.ones((2, 1), np.float32), ALL)
    kept = first.observations.copy()
    env.step(np.ones((2, 1), np.float32), ALL)
    np.testing.assert_array_equal(first.observations, kept)


def test_actions_are_clipped():
    env = line()
    place(env, 0.0, 0.0)
    step = env.step(np.array([[5.0], [1.0]], np.float32), ALL)
    assert step.observations[0] == step.observations[1]


def test_starts_depend_on_the_seed_alone():
    env = line()
    first = env.reset(np.array([3, 4]), ALL)
    env.step(np.ones((2, 1), np.float32), ALL)
    second = env.reset(np.array([4, 3]), ALL)
    np.testing.assert_array_equal(first, second[::-1])
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda env: env.reset(np.array([-3, 1]), ALL), 'must not be negative: -3'),
        (lambda env: env.reset(np.array([0.0, 1.0]), ALL), 'seeds must be 2 integers'),
        (lambda env: env.reset(np.array([0, 1]), np.ones(2)), 'where must be 2 booleans'),
        (lambda env: env.step(np.zeros((2, 2)), ALL), r'actions must be \[2, 1\], not \[2, 2\]'),
        (lambda env: env.step(np.zeros((2, 1)), np.ones(3, bool)), 'active must be 2 booleans'),
        (lambda env: env.step(np.array([[0], [np.inf]]), ALL), r'slots \[1\] are not finite'),
        (lambda env: env.set_state({}), 'the entries differ in'),
        (lambda env: env.set_state(line(7).get_state() | {'rewards': np.zeros(3, np.float32)}), r'rewards is float32\[3\]'),
    ],
)
def test_misuse_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(line())


def test_stepping_before_the_first_reset_is_refused():
    with pytest.raises(ValueError, match='no running episode'):
        envs.make('probe/host-line', 2).step(np.zeros((2, 1)), ALL)


def test_a_state_continues_bit_for_bit():
    env, other = line(), line()
    actions = np.random.default_rng(0).uniform(-1, 1, (12, 2, 1)).astype(np.float32)
    for action in actions[:5]:
        env.step(action, ALL)
    other.set_state(env.get_state())
    for action in actions[5:]:
        for ours, theirs in zip(env.step(action, ALL)[:4], other.step(action, ALL)[:4], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_spec_and_picture():
    env = line()
    assert env.spec.observations == ArraySpec((1,))
    assert env.spec.actions == ArraySpec((1,), -1.0, 1.0)
    assert (env.spec.horizon, env.on_device, env.num_envs) == (20, False, 2)
    place(env, -1.0, 1.0)
    assert (env.render(0)[:, 0] == 0).all()  # the point at the left edge
    assert (env.render(1)[:, -1] == 0).all()
