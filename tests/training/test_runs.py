"""A run as JSON and back, and starting from another run's networks."""

import json
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents
import envs
import training
from agents import registry, template
from agents.types import Stage
from data import npz
from data.dataset import from_trajectories, statistics
from envs.types import ArraySpec, DeviceEnv, Spec, Statistics
from training import folder, loop, members, runs

TINY = {'hidden_sizes': (8,), 'batch_size': 8, 'horizon_length': 2, 'flow_steps': 2}
CRITIC = {'critic_hidden_sizes': (8,), 'num_critics': 2}


@pytest.fixture(scope='module')
def spec(dataset):
    """Unbounded observations, with statistics, not all of them worth predicting."""
    return Spec(ArraySpec((1,)), ArraySpec((1,), -1, 1), 20, statistics(dataset), np.array([True]))


@pytest.fixture(scope='module')
def run(tmp_path_factory, dataset, spec):
    """(folder, agent, Result) of a clone of seeds 0 and 1, saved after 2 and 4 updates. The folder has an @ in its name."""
    path = tmp_path_factory.mktemp('me@lab') / 'run'
    overrides = {**TINY, 'normalize_observations': True}
    agent = agents.make('bc_flow', spec, **overrides)
    described = runs.describe('bc_flow', overrides, spec, 'probe/line')
    config = runs.run_config(described, (0, 1), {}, [Stage('train', 4)], runs.Task(spec, None, None))
    control = training.Control(num_devices=1, checkpoint_interval=2)
    result = training.fit(agent, dataset, 4, (0, 1), out=path, config=config, control=control, announce=lambda message: None)
    return path, agent, result


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def actions(agent, states, spec):
    return runs._plans(agent, states, jnp.linspace(-1, 1, 4)[:, None], spec)


def test_a_spec_and_overrides_survive_json(run, spec):
    config = folder.read_config(run[0])
    agent, rebuilt = runs.rebuild(config)
    assert rebuilt.observations == ArraySpec((1,), -np.inf, np.inf)
    assert rebuilt._replace(statistics=None, predict_mask=None) == spec._replace(statistics=None, predict_mask=None)
    np.testing.assert_array_equal(rebuilt.predict_mask, spec.predict_mask)
    jax.tree.map(np.testing.assert_array_equal, rebuilt.statistics, spec.statistics)
    assert config['agent']['overrides']['hidden_sizes'] == [8]
    assert agent.hyper == run[1].hyper


def test_who_diverged_is_read_from_the_checkpoint(run, tmp_path, dataset):
    """One clone learns from NaN: every update is non-finite, so both members are frozen for good."""
    path, agent, _ = run
    assert runs.load_diverged(path, 2, 2).tolist() == [False, False]
    assert runs.load_diverged(f'{path}@2', 4, 2).tolist() == [False, False]
    broken = dataset._replace(actions=dataset.actions * np.nan)
    training.fit(agent, broken, loop.MAX_SKIPPED, (0, 1), out=tmp_path / 'nan', announce=lambda message: None)
    assert runs.load_diverged(tmp_path / 'nan', loop.MAX_SKIPPED, 2).tolist() == [True, True]


def test_load_gives_the_same_actions(run, spec):
    path, agent, result = run
    loaded = training.load(path)
    assert loaded.counter == 4
    assert equal(loaded.state, result.state)
    np.testing.assert_array_equal(actions(loaded.agent, loaded.state, spec), actions(agent, result.state, spec))
    assert loaded.members.seeds.tolist() == [0, 1]


def test_a_step_can_be_named(run, spec):
    path, agent, result = run
    early = training.load(f'{path}@2')
    assert early.counter == 2
    assert not np.array_equal(actions(agent, early.state, spec), actions(agent, result.state, spec))
    assert equal(early.state, training.load(path, 2).state)
    for name, message in ((f'{path}@last', 'RUN@STEP'), (f'{path}@', 'RUN@STEP'), (f'{path}@3', 'no such checkpoint')):
        with pytest.raises(ValueError, match=message) as caught:
            training.load(name)
        assert '\n' not in str(caught.value)
    with pytest.raises(ValueError, match='is not a run folder'):
        training.load(path.parent)


def adopt(name, path, agent, seeds, said=None, **grid):
    team = members.over_grid(agent, seeds, grid)
    return runs.adopter(agent, name, path, (said if said is not None else []).append)(members.init_states(agent, team), team)


def test_members_adopt_those_of_their_seed(run, spec):
    path, _, result = run
    qam = agents.make('qam', spec, **TINY, **CRITIC, normalize_observations=True)
    said: list[str] = []
    states = adopt('bc', path, qam, (1, 0), said, discount=(0.9, 0.99))
    theirs = jax.tree.map(lambda leaf: leaf[np.array([1, 0, 1, 0])], result.state.params['base'])
    assert equal(states.params['tuned'], theirs)
    assert len(said) == 1
    assert float(said[0].split()[-1]) < 1e-5  # 'step-0 actions differ by at most'


def test_adopting_what_does_not_fit_is_one_line(run, spec):
    path, agent, _ = run

    def qam(**overrides):
        return agents.make('qam', spec, **{**TINY, **CRITIC, 'normalize_observations': True, **overrides})

    for name, other, seeds, message in (
        ('policy', agent, (0, 1), 'can start from bc'),
        ('bc', qam(hidden_sizes=(9,)), (0, 1), 'other shapes'),
        ('bc', qam(), (0, 1, 2), '2 members with other seeds than the 3 of this run'),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            adopt(name, path, other, seeds)
        assert '\n' not in str(caught.value)
    with pytest.raises(ValueError, match='is not a run folder'):
        adopt('bc', path.parent, qam(), (0, 1))


# -------------------------------------------------------------------------------------------------------- a dict of observations


DICT_SPEC = Spec({'position': ArraySpec((1,)), 'pixels': ArraySpec((2, 1), 0, 255, 'uint8')}, ArraySpec((1,), -1, 1), 20)


def as_dict(position):
    """Where the point of probe/line is, as it is and as two equal pixels."""
    pixels = jnp.round((position + 1) / 2 * 255).astype(jnp.uint8)
    return {'position': position, 'pixels': jnp.stack([pixels, pixels], -2)}


@pytest.fixture(scope='module')
def dict_task():
    """(agent module, DeviceEnv, Dataset): the template agent behind probe/line with a dict of observations."""

    def flat(observations):
        pixels = observations['pixels'].astype(jnp.float32) / 255
        return jnp.concatenate([observations['position'], pixels.reshape(*pixels.shape[:-2], 2)], -1)

    def make(config, spec):
        agent = template.make(config, Spec(ArraySpec((3,)), spec.actions, spec.horizon))
        train: Any = agent.phases['train']
        plan = agent.policy.plan

        def loss(params, state, batches, key):
            batch = {**batches['data'], 'observations': flat(batches['data']['observations'])}
            return train.loss(params, state, {'data': batch}, key)

        def plan_flat(state, memory, timestep, key, mode):
            return plan(state, memory, timestep._replace(observation=flat(timestep.observation)), key, mode)

        phase = train._replace(loss=loss, update=train.build(loss))
        return agent._replace(phases={'train': phase}, policy=agent.policy._replace(plan=plan_flat))

    line = envs.make('probe/line')

    def reset(key):
        state = line.reset(key)
        return state._replace(observation=as_dict(state.observation))

    def step(state, action):
        state = line.step(state._replace(observation=state.observation['position']), action)
        return state._replace(observation=as_dict(state.observation))

    module = types.ModuleType('dict_clone')
    vars(module).update(Config=template.Config, make=make)
    positions, actions = np.random.default_rng(0).uniform(-1, 1, (2, 42, 1)).astype(np.float32)
    observations = jax.tree.map(np.asarray, as_dict(positions))
    dataset = from_trajectories(observations, actions, -np.ones(42, np.float32), np.ones(42, np.float32), np.full(2, 20))
    return module, DeviceEnv(DICT_SPEC, reset, step), dataset


@pytest.mark.parametrize('with_statistics', [True, False])
def test_runs_on_a_dict_of_observations_are_described_loaded_and_adopted(dict_task, tmp_path, monkeypatch, with_statistics):
    module, env, dataset = dict_task
    monkeypatch.setitem(registry._REGISTERED, 'dict_clone', module)
    spec = DICT_SPEC._replace(statistics=statistics(dataset) if with_statistics else None)
    overrides = {'hidden_sizes': (8,), 'batch_size': 8}
    agent = agents.make('dict_clone', spec, **overrides)
    described = runs.describe('dict_clone', overrides, spec)
    config = runs.run_config(described, (0, 1), {}, [Stage('train', 3)], runs.Task(spec, None, None))
    control = training.Control(num_devices=1, eval_episodes=1)
    quiet = lambda message: None  # noqa: E731
    result = training.fit(agent, dataset, 3, (0, 1), eval_env=env, out=tmp_path, config=config, control=control, announce=quiet)
    assert np.isfinite(result.summary['eval']['eval/return']['']['per_seed']).all()

    _, rebuilt = runs.rebuild(folder.read_config(tmp_path))
    assert rebuilt.observations == spec.observations
    jax.tree.map(np.testing.assert_array_equal, rebuilt.statistics, spec.statistics)
    loaded = training.load(tmp_path)
    assert equal(loaded.state, result.state)

    team, said = members.over_grid(agent, (1, 0)), []
    states = runs.adopter(agent, 'policy', tmp_path, said.append)(members.init_states(agent, team), team)
    assert equal(states.params, jax.tree.map(lambda leaf: leaf[::-1], result.state.params))
    assert float(said[0].split()[-1]) < 1e-6
    # The check must notice an adoption that takes nothing over.
    deaf = agent._replace(adopt={'policy': lambda state, other: state})
    runs.adopter(deaf, 'policy', tmp_path, said.append)(members.init_states(agent, team), team)
    assert float(said[1].split()[-1]) > 1e-3


def test_example_observations_look_like_the_data():
    """Mean 3, deviation 0 gives 3; pixels without statistics fill 0..255; data beyond the bounds are cut there."""
    constant = Statistics(*np.full((4, 1), 3, np.float32) * np.array([1, 0, 1, 1])[:, None])
    random = np.random.default_rng(0)
    examples = runs._example_observations(DICT_SPEC, random)
    assert {name: (part.shape, str(part.dtype)) for name, part in examples.items()} == {
        'position': ((16, 1), 'float32'),
        'pixels': ((16, 2, 1), 'uint8'),
    }
    assert examples['pixels'].min() < 64
    assert examples['pixels'].max() > 191
    for part, expected in ((ArraySpec((1,)), 3), (ArraySpec((1,), -2, 2), 2)):
        np.testing.assert_array_equal(
            runs._example_observations(Spec(part, ArraySpec((1,)), 1, constant), random), np.full((16, 1), expected)
        )


def test_a_file_for_a_dict_of_observations_is_refused(tmp_path):
    npz.write(tmp_path / 'flat.npz', np.zeros((4, 1)), np.zeros((4, 1)), np.full(1, 3), np.zeros((4, 1)), np.zeros((4, 1)))
    with pytest.raises(ValueError, match=r"but lab/dict has \{'position': \(1,\), 'pixels': \(2, 1\)\} and \(1,\)"):
        runs.read_dataset(tmp_path / 'flat.npz', 'lab/dict', DICT_SPEC)


# ------------------------------------------------------------------------------------------------------------------------ refusals


def test_only_the_last_stage_may_grow(spec):
    """The counts of earlier stages define the run: changing one would move the borders of what is done already."""

    def config(*counts):
        stages = [Stage('train', count) for count in counts]
        return json.loads(folder.to_json(runs.run_config({}, (0,), {}, stages, runs.Task(spec, None, None))))

    def refused(old, new):
        from training.trainer import MUTABLE

        return [name for name in folder.differences(old, new) if name.split('.')[0] not in MUTABLE]

    assert refused(config(3, 5), config(3, 9)) == []
    assert refused(config(3, 5), config(4, 5)) == ['stages']
    assert refused(config(5), config(9)) == []


def test_data_of_another_environment_are_refused(tmp_path):
    """The file has three observations and two actions: said before rewards are computed from its qpos, where numpy would complain."""
    rows = 2 * 4
    file, flat = tmp_path / 'three.npz', np.zeros((rows, 2))
    npz.write(file, np.zeros((rows, 3)), flat, np.full(2, 3), flat, flat)
    for env_name in ('probe/line', 'ogbench/pointmaze-medium-singletask-task1-v0'):
        with pytest.raises(ValueError, match=r'has observations \(3,\) and actions \(2,\).*recorded in another environment') as caught:
            training.make_task(env_name, file)
        assert '\n' not in str(caught.value)
