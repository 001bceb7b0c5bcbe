"""Scripted experts: what they record, and that OGBench reads it and gives the rewards that `envs.relabel` gives."""

from typing import Any

import numpy as np
import ogbench
import pytest

import envs
from data import npz
from envs import generate

NAVIGATE = 'ogbench/pointmaze-medium-navigate-v0'


def episodes(result, name):
    """Column `name` as [episodes, steps, ...]."""
    num_episodes = len(result.arrays['lengths'])
    return result.arrays[name].reshape(num_episodes, -1, result.arrays[name].shape[-1])


@pytest.fixture(scope='module')
def navigate():
    return generate.generate(NAVIGATE, 2)


@pytest.fixture(scope='module')
def cubes():
    return {kind: generate.generate(f'ogbench/cube-single-{kind}-v0', 2, seed=1) for kind in ('play', 'noisy')}


def test_layout(navigate):
    shapes = {name: (values.shape, str(values.dtype)) for name, values in navigate.arrays.items()}
    columns = dict.fromkeys(('observations', 'actions', 'qpos', 'qvel'), ((2002, 2), 'float32'))
    assert shapes == {**columns, 'lengths': ((2,), 'int64')}
    assert navigate.arrays['lengths'].tolist() == [1000, 1000]  # transitions; the final observation has a row too
    np.testing.assert_array_equal(navigate.arrays['observations'], navigate.arrays['qpos'])


def test_actions_lead_from_row_to_row(navigate):
    """A point moves by 0.2 a, unless a wall pushes it back: then by less, never by more (walls push to the nearest free place)."""
    positions, actions = episodes(navigate, 'qpos').astype(float), episodes(navigate, 'actions').astype(float)
    errors = np.abs(np.diff(positions, axis=1) - 0.2 * actions[:, :-1]).max(axis=-1)
    assert (errors < 1e-5).mean() > 0.8
    assert errors.max() < 0.2


def test_navigation_reaches_its_goals(navigate):
    assert navigate.goals_reached >= 8  # about 9 in each episode of 1001 steps
    assert navigate.goals_set == navigate.goals_reached + 2


def test_guide_is_ogbenchs_oracle():
    env = generate._built('pointmaze-large-v0')
    rng = np.random.default_rng(0)
    cells, _ = generate._free_cells(env.maze_map)
    centres = np.array([env.ij_to_xy(cell) for cell in rng.choice(cells, 400)])
    positions, goals = np.split(centres + rng.uniform(-1.9, 1.9, (400, 2)), 2)
    directions = generate._Guide(env)(positions, goals)
    for position, goal, direction in zip(positions, goals, directions, strict=True):
        offset = env.get_oracle_subgoal(position, goal)[0] - position
        np.testing.assert_allclose(direction, offset / (np.linalg.norm(offset) + 1e-6), atol=1e-12)


def test_goals_are_put_where_ogbench_puts_them():
    """Corners, crossings and dead ends, no straight corridors: counted by hand on a map with one of each."""
    plan = np.array([[1, 1, 1, 1, 1], [1, 0, 0, 0, 1], [1, 1, 1, 0, 1], [1, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    cells, vertices = generate._free_cells(plan)
    assert cells.tolist() == [[1, 1], [1, 2], [1, 3], [2, 3], [3, 3]]
    assert vertices.tolist() == [[1, 1], [1, 3], [3, 3]]  # (1, 2) and (2, 3) are corridors


def test_exploration_has_the_noise_of_its_recipe():
    result = generate.generate('ogbench/pointmaze-medium-explore-v0', 20)
    actions = episodes(result, 'actions')
    rng = np.random.default_rng(0)
    angles = rng.uniform(0, 2 * np.pi, 10**6)
    expected = np.clip(np.cos(angles) + rng.normal(0, 0.5, 10**6), -1, 1)
    # 2002 headings: their mean of a cosine has a standard error of 0.016, the standard deviation one of about 0.008.
    assert np.abs(actions.mean(axis=(0, 1)) - expected.mean()).max() < 0.06
    assert np.abs(actions.std(axis=(0, 1)) - expected.std()).max() < 0.03
    assert np.abs((np.abs(actions) >= 1).mean() - (np.abs(expected) >= 1).mean()) < 0.02
    # A heading lasts ten steps: neighbours within a block share it, the last of one and the first of the next do not.
    blocks = actions[:, :1000].reshape(20, 100, 10, 2)
    within = np.mean(blocks[:, :, 4] * blocks[:, :, 5])
    across = np.mean(blocks[:, :-1, 9] * blocks[:, 1:, 0])
    assert within > 0.25 > 0.05 > abs(across)


@pytest.mark.parametrize('kind', ['stitch', 'path'])
def test_goals_that_are_stayed_at(kind):
    result = generate.generate(f'ogbench/pointmaze-medium-{kind}-v0', 6)
    steps = 201 if kind == 'stitch' else 1001
    assert result.arrays['lengths'].tolist() == [steps - 1] * 6
    assert 4 <= result.goals_reached <= 6 == result.goals_set
    ends = episodes(result, 'qpos')[:, -30:]
    assert np.linalg.norm(ends - ends.mean(axis=1, keepdims=True), axis=-1).max() < 3  # within a cell (4 wide) at the end
    if kind == 'stitch':  # goals are four cells away
        starts = episodes(result, 'qpos')[:, 0]
        assert 4 < np.linalg.norm(ends[:, -1] - starts, axis=-1).max() < 4 * 4 + 4


def test_giant_mazes_get_longer_episodes():
    assert [generate.recipe(f'ogbench/pointmaze-giant-{kind}-v0').num_steps for kind in ('navigate', 'explore')] == [2001, 1001]


def test_teleports_show_where_the_portal_was_entered():
    result = generate.generate('ogbench/pointmaze-teleport-explore-v0', 8)
    differs = (result.arrays['observations'] != result.arrays['qpos']).any(axis=-1)
    assert 0 < differs.sum() < 200


@pytest.mark.parametrize('name', [NAVIGATE, 'ogbench/cube-single-noisy-v0'])
def test_an_episode_depends_on_seed_split_and_number_alone(name, navigate, cubes):
    two, seed = (navigate, 0) if name == NAVIGATE else (cubes['noisy'], 1)
    second = generate.episodes(name, seed, 'train', [1])
    others = generate.episodes(name, seed, 'val', [1]), generate.episodes(name, seed + 1, 'train', [1])
    for column in ('observations', 'actions', 'qpos', 'qvel'):
        np.testing.assert_array_equal(episodes(two, column)[1], second.arrays[column])
        for other in others:
            assert (episodes(two, column)[1] != other.arrays[column]).any()


def test_workers_make_the_same(monkeypatch):
    monkeypatch.setattr(generate, '_MAZE_CHUNK', 2)
    counts = []
    alone = generate.generate('ogbench/pointmaze-medium-stitch-v0', 5)
    shared = generate.generate('ogbench/pointmaze-medium-stitch-v0', 5, num_workers=2, progress=counts.append)
    for name, values in alone.arrays.items():
        np.testing.assert_array_equal(values, shared.arrays[name])
    assert alone[1:] == shared[1:]
    assert counts == [2, 2, 1]


def test_numpys_generator_is_left_alone(navigate):
    np.random.seed(3)  # noqa: NPY002
    generate.episodes(NAVIGATE, 0, 'train', [0])
    assert np.random.uniform() == np.random.RandomState(3).uniform()  # noqa: NPY002


@pytest.mark.parametrize('kind', ['play', 'noisy'])
def test_cubes_are_picked_and_placed(kind, cubes):
    result = cubes[kind]
    assert result.arrays['observations'].shape == (2002, 28)
    assert np.abs(result.arrays['actions']).max() <= 1
    assert result.goals_reached >= 12  # of about 12 tasks in each episode
    assert result.goals_reached >= 0.7 * (result.goals_set - 2)  # the last of each episode is cut
    heights = result.arrays['qpos'][:, 16]  # of the cube, which rests at 0.02
    assert heights.max() > 0.1


def test_noise_of_noisy_cubes(monkeypatch):
    """With an expert that stands still, what is left is the recipe's noise: N(0, xi [1, 1, 1, 3, 10]), or uniform one time in ten."""
    from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle

    monkeypatch.setattr(CubeMarkovOracle, 'select_action', lambda self, observation, info: np.zeros(5))
    actions = generate.episodes('ogbench/cube-single-noisy-v0', 0, 'train', [0]).arrays['actions']
    # xi < 0.1, so |a_x| > 1/2 (five standard deviations) comes from the uniform: 0.1 * 0.5 of three coordinates, standard error 0.007.
    assert abs((np.abs(actions[:, :3]) > 0.5).mean() - 0.05) < 0.02
    scales = np.median(np.abs(actions), axis=0)
    np.testing.assert_allclose(scales / scales[:3].mean(), [1, 1, 1, 3, 10], rtol=0.15)


@pytest.mark.parametrize(
    ('name', 'task'), [('pointmaze-medium-navigate', 'task5'), ('cube-single-play', 'task1'), ('cube-single-noisy', 'task2')]
)
def test_ogbench_reads_the_file_and_gives_the_same_rewards(name, task, navigate, cubes, tmp_path):
    result = navigate if 'maze' in name else cubes[name.rpartition('-')[2]]
    path = tmp_path / f'{name}-v0.npz'
    npz.write(path, **result.arrays)
    npz.write(tmp_path / f'{name}-v0-val.npz', **result.arrays)
    made: Any = ogbench.make_env_and_datasets(f'{name}-singletask-{task}-v0', dataset_path=str(path))
    env, train, _ = made
    rewards, masks = envs.relabel(f'ogbench/{name}-singletask-{task}-v0', npz.read(path))
    keep = np.ones(len(rewards), bool)
    keep[np.cumsum(result.arrays['lengths'] + 1) - 1] = False  # OGBench drops final rows
    np.testing.assert_array_equal(rewards[keep], train['rewards'])
    np.testing.assert_array_equal(masks[keep], train['masks'])
    assert 0 < (masks == 0).sum() < len(masks)
    env.close()


@pytest.mark.parametrize(
    ('arguments', 'answer'),
    [
        (('ogbench/pointmaze-medum-navigate-v0', 1), 'did you mean ogbench/pointmaze-medium-navigate-v0'),
        (('ogbench/antmaze-medium-navigate-v0', 1), 'unknown dataset'),
        (('ogbench/cube-triple-play-v0', 1), 'unknown dataset'),
        (('ogbench/pointmaze-medium-play-v0', 1), 'unknown dataset'),
        (('probe/line', 1), 'unknown dataset'),
        (('ogbench/cube-single-v0', 1), 'lacks the type of the dataset: write ogbench/cube-single-TYPE-v0, TYPE one of play, noisy'),
        ((f'{NAVIGATE}:implementation=gym', 1), "has no option 'implementation'"),
        ((NAVIGATE, 0), 'num_episodes must be a whole number of at least 1'),
        ((NAVIGATE, 1, -1), 'seed must be'),
        ((NAVIGATE, 1, 0, 'explore'), 'is of type navigate, not explore'),
        ((NAVIGATE, 1, 0, None, 'test'), 'split must be train or val'),
    ],
)
def test_errors(arguments, answer):
    with pytest.raises(ValueError, match=answer):
        generate.generate(*arguments)


def test_names_of_tasks_are_accepted():
    expected = generate.recipe(NAVIGATE)
    assert generate.recipe('ogbench/pointmaze-medium-navigate-singletask-task4-v0') == expected
    assert generate.recipe('ogbench/pointmaze-medium-singletask-v0', 'navigate') == expected
    assert all(f'ogbench/{generate.recipe(name).name}' == name for name in generate.names())
