"""The general OGBench environment: many slots on one model against OGBench's own environments alone."""

import gymnasium
import numpy as np
import pytest

import envs

CUBE = 'cube-single-singletask-task2-v0'
BOTH = np.ones(2, bool)


@pytest.fixture(scope='module')
def cube():
    return envs.make(f'ogbench/{CUBE}', 2)


@pytest.fixture(scope='module')
def gym_cube():
    """OGBench's environment. It draws its warm-up actions from a new, randomly seeded space at each reset: here from one that is seeded."""
    from ogbench.manipspace.envs.manipspace_env import ManipSpaceEnv

    space = gymnasium.spaces.Box(-1, 1, (5,), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ManipSpaceEnv, 'action_space', space)
        env = gymnasium.make(CUBE, disable_env_checker=True)
        yield env, space


def put_cube(data, position):
    data.joint('object_joint_0').qpos[:3] = position


def test_cube_equals_gym(cube, gym_cube):
    env, space = gym_cube
    actions = np.random.default_rng(0).uniform(-1, 1, (40, 2, 5)).astype(np.float32)
    observations = cube.reset(np.array([7, 8]), BOTH)
    steps = []
    for index, action in enumerate(actions):
        if index == 30:
            for slot in range(2):
                put_cube(cube._slots[slot].data, (0.5, 0.0, 0.02))
        steps.append(cube.step(action, BOTH if index < 32 else np.zeros(2, bool)))
    for slot in range(2):  # one after the other: slots must not disturb each other
        space.seed(7 + slot)
        observation, _ = env.reset(seed=7 + slot)
        np.testing.assert_array_equal(observations[slot], observation.astype(np.float32))
        for index, action in enumerate(actions):
            if index == 30:
                put_cube(env.unwrapped.data, (0.5, 0.0, 0.02))  # onto the target of task 2
            observation, reward, terminated, _, info = env.step(action[slot])
            np.testing.assert_array_equal(steps[index].observations[slot], observation.astype(np.float32))
            assert steps[index].rewards[slot] == reward
            assert steps[index].masks[slot] == 1 - terminated
            assert steps[index].metrics['success'][slot] == info['success']
            if terminated:
                break
        # Step 30 leads to a solved state; the reward is that of the state before a step, so step 31 gets it.
        assert (index, reward) == (31, 0.0)


def test_cube_resets_depend_on_the_seed_alone(cube):
    first = cube.reset(np.array([3, 4]), BOTH)
    states = [cube.get_state()]
    for action in np.random.default_rng(0).uniform(-1, 1, (5, 2, 5)):
        cube.step(action, BOTH)
    second = cube.reset(np.array([4, 3]), BOTH)
    states.append(cube.get_state())
    np.testing.assert_array_equal(first, second[::-1])
    for key, values in states[0].items():
        np.testing.assert_array_equal(values, states[1][key][::-1], err_msg=key)


@pytest.mark.parametrize('name', [f'ogbench/{CUBE}', 'ogbench/scene-singletask-task2-v0', 'ogbench/antmaze-teleport-singletask-v0'])
def test_a_state_continues_bit_for_bit_in_a_fresh_environment(name):
    env, other = envs.make(name, 2), envs.make(name, 2)
    env.reset(np.array([1, 2]), BOTH)
    other.reset(np.array([5, 6]), BOTH)
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 2, *env.spec.actions.shape)).astype(np.float32)
    for index, action in enumerate(actions[:10]):
        env.step(action, np.array([True, index % 2 == 0]))
    other.set_state(env.get_state())
    for action in actions[10:]:
        ours, theirs = env.step(action, BOTH), other.step(action, BOTH)
        np.testing.assert_array_equal(ours.observations, theirs.observations)
        np.testing.assert_array_equal(ours.rewards, theirs.rewards)
    for key, values in env.get_state().items():
        np.testing.assert_array_equal(values, other.get_state()[key], err_msg=key)


def test_success_is_remembered_by_a_state(cube):
    """Whether a step ends the episode was decided after the step before, and the environment has stored it."""
    cube.reset(np.array([1, 2]), BOTH)
    put_cube(cube._slots[1].data, (0.5, 0.0, 0.02))
    assert cube.step(np.zeros((2, 5)), BOTH).masks.tolist() == [1, 1]
    state = cube.get_state()
    cube.reset(np.array([1, 2]), BOTH)
    cube.set_state(state)
    step = cube.step(np.zeros((2, 5)), BOTH)
    assert step.rewards.tolist() == [-1, 0]
    assert step.masks.tolist() == [1, 0]
    assert step.metrics['success'].tolist() == [0, 1]


def test_slots_of_a_scene_have_their_own_locks():
    """A scene locks its drawer by damping in the model, which the slots share, while its first button is off."""
    env = envs.make('ogbench/scene-singletask-task2-v0', 2)
    env.reset(np.array([1, 2]), BOTH)
    state = env.get_state()
    state['simulation/env/_cur_button_states'][:] = [[0, 0], [1, 1]]
    env.set_state(state)
    env.step(np.zeros((2, 5)), BOTH)  # sets the locks
    state = env.get_state()
    env.reset(np.array([3, 4]), BOTH)
    env.set_state(state)
    drawers = [slot.data.joint('drawer_slide') for slot in env._slots]
    starts = [drawer.qpos[0] for drawer in drawers]
    for drawer in drawers:
        drawer.qvel[0] = -0.5
    env.step(np.zeros((2, 5)), BOTH)
    moves = [abs(drawer.qpos[0] - start) for drawer, start in zip(drawers, starts, strict=True)]
    assert moves[0] < 1e-5 < 1e-3 < moves[1]


def test_both_implementations_of_a_point_maze_agree():
    name = 'ogbench/pointmaze-large-navigate-singletask-task3-v0'
    ours, theirs = envs.make(name, 3), envs.make(f'{name}:implementation=gym', 3)
    assert type(ours) is not type(theirs)
    assert ours.spec == theirs.spec
    seeds = np.arange(3)
    np.testing.assert_array_equal(ours.reset(seeds, np.ones(3, bool)), theirs.reset(seeds, np.ones(3, bool)))
    for action in np.random.default_rng(0).uniform(-1, 1, (100, 3, 2)):
        left, right = ours.step(action, np.ones(3, bool)), theirs.step(action, np.ones(3, bool))
        np.testing.assert_array_equal(left.observations, right.observations)
        np.testing.assert_array_equal(left.rewards, right.rewards)


def test_time_limits_are_ogbenchs(cube):
    assert cube.spec.horizon == 200
    assert cube.spec.observations.shape == (28,)
    assert envs.make('ogbench/antmaze-medium-singletask-v0').spec.horizon == 1000
