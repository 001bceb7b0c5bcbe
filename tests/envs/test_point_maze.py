"""The batched point maze against OGBench's own environment, bit for bit."""

# pyright: reportAttributeAccessIssue=false
# (mujoco's functions come from C++ without stubs)

from typing import Any

import gymnasium
import mujoco
import numpy as np
import pytest

import envs

NUM_STEPS = 600
NAME = 'ogbench/pointmaze-medium-singletask-task1-v0'


def headings(rng, num_steps, num_slots):
    """Noisy actions that keep a direction for 20 steps, so that points run into walls and corners."""
    angles = np.repeat(rng.uniform(0, 2 * np.pi, (num_steps // 20, num_slots)), 20, axis=0)
    actions = np.stack([np.cos(angles), np.sin(angles)], axis=-1) + rng.normal(0, 0.3, (num_steps, num_slots, 2))
    return np.clip(actions, -1, 1).astype(np.float32)


def reference(identifier, seed, actions, target=None):
    """One episode of OGBench's environment. With `target`, a cell, it follows the oracle there; returns what it did and saw."""
    env: Any = gymnasium.make(identifier)
    np.random.seed(seed)  # noqa: NPY002
    observation, _ = env.reset(seed=seed)
    rows, taken = [(observation, 0.0, False, False, 0.0)], []
    for action in actions:
        if target is not None:
            goal = env.unwrapped.ij_to_xy(target)
            offset = env.unwrapped.get_oracle_subgoal(env.unwrapped.get_xy(), goal)[0] - env.unwrapped.get_xy()
            action = np.clip(offset / (np.linalg.norm(offset) + 1e-6) + 0.3 * action, -1, 1).astype(np.float32)
        observation, reward, terminated, truncated, info = env.step(action)
        taken.append(action)
        rows.append((observation, reward, terminated, truncated, info['success']))
        if terminated or truncated:
            break
    state = np.empty(mujoco.mj_stateSize(env.unwrapped.model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(env.unwrapped.model, env.unwrapped.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    return np.array(taken), rows, state


def compare(identifier, targets, num_steps=NUM_STEPS):
    """Steps all slots together as long as their references run; returns the references' rows."""
    num_slots = len(targets)
    actions = headings(np.random.default_rng(0), num_steps, num_slots)
    runs = [reference(identifier, 10 + slot, actions[:, slot], target) for slot, target in enumerate(targets)]
    env = envs.make(f'ogbench/{identifier}', num_slots)
    observations = env.reset(10 + np.arange(num_slots), np.ones(num_slots, bool))
    for slot, (_, rows, _) in enumerate(runs):
        np.testing.assert_array_equal(observations[slot], rows[0][0].astype(np.float32))
    for index in range(num_steps):
        active = np.array([index < len(taken) for taken, _, _ in runs])
        block = np.stack([taken[min(index, len(taken) - 1)] for taken, _, _ in runs])
        step = env.step(block, active)
        for slot in np.flatnonzero(active):
            observation, reward, terminated, truncated, success = runs[slot][1][index + 1]
            np.testing.assert_array_equal(step.observations[slot], observation.astype(np.float32))
            assert step.rewards[slot] == reward
            assert step.masks[slot] == 1 - terminated
            assert step.truncations[slot] == (truncated and not terminated)
            assert step.metrics['success'][slot] == success
    np.testing.assert_array_equal(env.get_state()['simulation/physics'], np.stack([state for _, _, state in runs]))
    return [rows for _, rows, _ in runs]


def test_equals_gym_with_walls_and_goal():
    rows = compare('pointmaze-medium-singletask-task1-v0', [None, (6, 6), None])
    assert rows[1][-1][1:] == (0.0, True, False, 1.0)  # the guided point reached its goal: reward 0, terminated
    assert 50 < len(rows[1]) < NUM_STEPS
    positions = np.array([row[0] for row in rows[0]])
    moves = np.linalg.norm(np.diff(positions, axis=0), axis=-1)
    assert (moves < 0.05).sum() > 20  # the others were stopped by walls


def test_equals_gym_with_teleports():
    rows = compare('pointmaze-teleport-singletask-task1-v0', [(4, 6), None, (5, 1)], 400)
    jumps = [np.linalg.norm(np.diff(np.array([row[0] for row in slot]), axis=0), axis=-1).max() for slot in rows]
    assert max(jumps) > 3


def test_the_time_limit_truncates():
    env = envs.make(NAME, 1)
    env.reset(np.array([0]), np.ones(1, bool))
    state = env.get_state()
    state['num_steps'][:] = 998
    env.set_state(state)
    assert env.step(np.zeros((1, 2)), np.ones(1, bool)).truncations.tolist() == [0]
    step = env.step(np.zeros((1, 2)), np.ones(1, bool))
    assert (step.truncations[0], step.masks[0]) == (1, 1)


def test_resets_depend_on_the_seed_alone_and_leave_numpys_generator_alone():
    env = envs.make(NAME, 2)
    np.random.seed(5)  # noqa: NPY002
    expected = np.random.RandomState(5).uniform()
    first = env.reset(np.array([3, 4]), np.ones(2, bool))
    env.step(np.ones((2, 2)), np.ones(2, bool))
    second = env.reset(np.array([4, 3]), np.ones(2, bool))
    np.testing.assert_array_equal(first, second[::-1])
    assert (first[0] != first[1]).all()
    assert np.random.uniform() == expected  # noqa: NPY002


@pytest.mark.parametrize('name', [NAME, 'ogbench/pointmaze-teleport-singletask-task1-v0'])
def test_a_state_continues_bit_for_bit_in_a_fresh_environment(name):
    actions = headings(np.random.default_rng(1), 200, 4)
    env, other = envs.make(name, 4), envs.make(name, 4)
    env.reset(np.arange(4), np.ones(4, bool))
    for action in actions[:100]:
        env.step(action, np.ones(4, bool))
    other.set_state(env.get_state())
    for action in actions[100:]:
        ours, theirs = env.step(action, np.ones(4, bool)), other.step(action, np.ones(4, bool))
        np.testing.assert_array_equal(ours.observations, theirs.observations)
    for key, values in env.get_state().items():
        np.testing.assert_array_equal(values, other.get_state()[key])


def test_spec():
    spec = envs.make(NAME).spec
    assert (spec.observations.shape, spec.actions.shape, spec.horizon) == ((2,), (2,), 1000)
    assert (spec.actions.minimum, spec.actions.maximum) == (-1, 1)
