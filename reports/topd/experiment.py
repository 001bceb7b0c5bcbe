"""Measures reports/topd/plan.md. Run by `python scripts/report.py topd --scale=smoke|report --out=DIR`; resumable, cell by cell."""

import statistics as medians
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import agents
import envs
from envs import lqr
from losses.distances import gaussian_kl
from losses.distillation import mixture_reward
from losses.policy_gradient import gaussian_log_prob
from training import Control, fit, folder, members, statistics
from training.evaluation import Evaluator

matplotlib.use('Agg')
from matplotlib import pyplot as plt

CASES = ((1, 1.0, 0.5), (6, 1.0, 0.7), (6, 3.0, 0.7), (6, 6.0, 0.7), (6, 3.0, 0.3), (17, 4.0, 0.5))
WEIGHT = 0.2
REWARDS = {
    'opd': lambda log_ratio: log_ratio,
    'topd': lambda log_ratio: mixture_reward(log_ratio, WEIGHT),
    'scaled': lambda log_ratio: WEIGHT * log_ratio,
    'cut': lambda log_ratio: jnp.maximum(log_ratio, jnp.log1p(-WEIGHT)),
}
AXES = 3
ENV = f'lqr/double-integrator:axes={AXES}'
TEACHERS = {'wide': 1.0, 'narrow': 0.2}  # standard deviation
ANALYTIC = {'estimator': 'analytic', 'proximal': 'none'}
ARMS: dict[str, dict[str, Any]] = {
    'opd_1': {'proximal': 'none', 'num_minibatches': 1},
    'opd_16': {'proximal': 'none'},
    'topd_1': {'num_minibatches': 1},
    'topd_16': {},
    'opd_dim_16': {'estimator': 'per_dimension', 'proximal': 'none'},
    'topd_dim_16': {'estimator': 'per_dimension'},
    'analytic_16': ANALYTIC,
    'kl_radius_16': {**ANALYTIC, 'proximal': 'kl_radius', 'kl_budget': 0.3},
    'decoupled_16': {**ANALYTIC, 'proximal': 'decoupled', 'kl_budget': 0.3, 'covariance_budget': 0.01},
    'dagger_16': {**ANALYTIC, 'direction': 'forward', 'aggregate': True},
}
PAIRS = (
    ('topd_16', 'opd_1'),
    ('topd_16', 'opd_16'),
    ('topd_1', 'opd_1'),
    ('opd_16', 'opd_1'),
    ('topd_dim_16', 'opd_dim_16'),
    ('topd_16', 'analytic_16'),
    ('kl_radius_16', 'analytic_16'),
    ('kl_radius_16', 'topd_16'),
)
RATES = (1e-3, 3e-3, 1e-2)
NUM_ENVS, LENGTH = 16, 16
SCALES: dict[str, dict[str, Any]] = {
    'smoke': {'updates': 20, 'tuning': (0,), 'seeds': (1, 2), 'samples': 2000, 'repeats': 2, 'timings': 3},
    'report': {
        'updates': 200,
        'tuning': tuple(range(5)),
        'seeds': tuple(range(100, 120)),
        'samples': 100_000,
        'repeats': 10,
        'timings': 15,
    },
}


def run(scale: str, out: Path) -> None:
    """Runs what is missing of every cell, then writes results.json, table.md and the figures into `out`."""
    settings = SCALES[scale]
    out.mkdir(parents=True, exist_ok=True)
    gradients = _kept(out / 'gradients.json', lambda: one_state(settings))
    curves = {}
    for teacher, std in TEACHERS.items():
        for arm, overrides in ARMS.items():
            cell = out / 'cells' / f'{teacher}-{arm}.json'
            cell.parent.mkdir(exist_ok=True)
            curves[teacher, arm] = _kept(cell, lambda std=std, overrides=overrides: distil(settings, std, overrides))
            print(f'{teacher} {arm}: endpoint {np.mean(curves[teacher, arm]["endpoint"]):.2f}', flush=True)
    cost = _kept(out / 'cost.json', lambda: overhead(settings['timings']))
    claims = _gradient_claims(gradients, scale) + _claims(curves, scale) + [_cost_claim(cost, scale)]
    raw = {f'{teacher}/{arm}': {k: v for k, v in cell.items() if k != 'kl'} for (teacher, arm), cell in curves.items()}
    folder.write_json(
        out / 'results.json',
        {'scale': scale, 'claims': claims, 'control': _control(curves), 'cost': cost, 'gradients': gradients, 'raw': raw}
        | {'provenance': folder.provenance(machine=False)},
    )
    folder.write_text(out / 'table.md', _table(gradients, curves))
    _plot(curves, out / 'curves.png')


def _kept(path: Path, measure: Any) -> Any:
    if not path.exists():
        folder.write_json(path, measure())
    return _revive(folder.read_json(path))


def _revive(value: Any) -> Any:
    """JSON spells infinities as text."""
    if isinstance(value, dict):
        return {key: _revive(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_revive(item) for item in value]
    return float(value) if value in ('inf', '-inf') else value


# ------------------------------------------------------------------------------------------------------------------ E0: one state


def one_state(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Trace, signal-to-noise and direction of score-function gradients, per case, credit and reward; one entry per repeat."""
    rows = []
    for size, distance, teacher_std in CASES:
        for joint in (True, False):
            for name, reward in REWARDS.items():
                measure = jax.jit(
                    lambda key, s=size, d=distance, t=teacher_std, j=joint, r=reward: _moments(key, s, d, t, j, r, settings['samples'])
                )
                values = [measure(jax.random.key(repeat)) for repeat in range(settings['repeats'])]
                columns = dict(zip(('trace', 'snr', 'cosine'), np.asarray(values).T.tolist(), strict=True))
                rows.append(
                    {
                        'd': size,
                        'delta': distance,
                        'std': teacher_std,
                        'credit': 'joint' if joint else 'dimension',
                        'reward': name,
                        **columns,
                    }
                )
    return rows


def _moments(key: Any, size: int, distance: float, teacher_std: float, joint: bool, reward: Any, samples: int) -> tuple[Any, Any, Any]:
    direction_key, key = jax.random.split(key)
    direction = jax.random.normal(direction_key, (size,))
    teacher = (distance * direction / jnp.linalg.norm(direction), jnp.full(size, jnp.log(teacher_std)))
    old = (jnp.zeros(size), jnp.zeros(size))
    actions = jax.random.normal(key, (samples, size))
    log_prob = jax.vmap(gaussian_log_prob, (None, None, 0))
    log_ratio = log_prob(*teacher, actions) - log_prob(*old, actions)
    rewards = reward(jnp.sum(log_ratio, axis=1, keepdims=True) if joint else log_ratio)
    advantages = jnp.broadcast_to(rewards - jnp.mean(rewards, axis=0), actions.shape)
    gradients = jnp.concatenate([advantages * actions, advantages * (jnp.square(actions) - 1)], axis=1)  # of mean and log std
    mean = jnp.mean(gradients, axis=0)
    trace = jnp.sum(jnp.var(gradients, axis=0))
    signal = jnp.maximum(jnp.sum(jnp.square(mean)) - trace / samples, 0)
    exact = -jnp.concatenate(jax.grad(lambda mean, log_std: gaussian_kl(mean, log_std, *teacher), (0, 1))(*old))
    norms = jnp.linalg.norm(mean) * jnp.linalg.norm(exact)
    cosine = jnp.vdot(mean, exact) / jnp.where(norms > 0, norms, 1)  # 0 where every reward is the same
    return trace, signal / jnp.maximum(trace, 1e-30), cosine


# ------------------------------------------------------------------------------------------------------- E1: the double integrator


def exact_teacher(std: float) -> dict[str, Any]:
    """Parameters of the affine teacher N(K x, std^2), the optimum at the temperature that gives it this standard deviation."""
    _, unit, _ = lqr.optimal_policy(AXES, temperature=1.0)
    gain, covariance, _ = lqr.optimal_policy(AXES, temperature=std**2 / unit[0, 0])
    kernel = jnp.asarray(gain.T, jnp.float32)
    log_std = jnp.asarray(0.5 * np.log(np.diag(covariance)), jnp.float32)
    return {'params': {'MLP_0': {'Dense_0': {'kernel': kernel, 'bias': jnp.zeros(AXES)}}, 'log_std': log_std}}


def with_teacher(std: float) -> Any:
    """A `prepare_states` that gives every member the exact teacher."""

    def prepare(states: Any, team: members.Members) -> Any:
        teacher = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(team.seeds), *leaf.shape)), exact_teacher(std))
        return states._replace(teacher=teacher)

    return prepare


def _agent(env: Any, overrides: dict[str, Any]) -> Any:
    return agents.make('topd', env.spec, teacher_hidden_sizes=(), rollout_length=LENGTH, **overrides)


def _train(
    settings: dict[str, Any], std: float, overrides: dict[str, Any], seeds: tuple[int, ...], rates: tuple[float, ...]
) -> tuple[Any, Any, np.ndarray]:
    """(agent, result, KL to the teacher before each update [updates, members])."""
    env = envs.make(ENV)
    agent = _agent(env, overrides)
    kl: list[np.ndarray] = []
    result = fit(
        agent,
        env,
        settings['updates'],
        seeds,
        num_envs=NUM_ENVS,
        replay_capacity=settings['updates'] * LENGTH,
        grid={'learning_rate': rates},
        prepare_states=with_teacher(std),
        control=Control(log_interval=1),
        progress_fn=lambda update, metrics: kl.append(np.asarray(metrics['distill/kl_to_teacher'])),
        announce=lambda line: None,
    )
    values = np.stack(kl)
    return agent, result, np.where(np.isfinite(values), values, np.inf)


def endpoint(kl: np.ndarray) -> np.ndarray:
    """Mean over the updates of log10 KL, which counts as 1e6 where it is not finite, [updates, members] -> [members]."""
    return np.log10(np.maximum(np.where(np.isfinite(kl), kl, 1e6), 1e-6)).mean(axis=0)


def largest_rise(kl: np.ndarray) -> np.ndarray:
    """Largest ratio of a window mean to the smallest before it, [updates, members] -> [members]."""
    windows = kl[: len(kl) // 5 * 5].reshape(-1, 5, kl.shape[1]).mean(axis=1)
    return (windows / np.minimum.accumulate(windows, axis=0)).max(axis=0)


def distil(settings: dict[str, Any], std: float, overrides: dict[str, Any]) -> dict[str, Any]:
    """One arm: the learning rate on the tuning seeds, then the reported seeds."""
    _, tuned, kl = _train(settings, std, overrides, settings['tuning'], RATES)
    rates = np.asarray(tuned.state.hyper['learning_rate'])
    by_rate = {rate: float(endpoint(kl)[np.isclose(rates, rate)].mean()) for rate in RATES}
    rate = min(by_rate, key=lambda each: by_rate[each])
    agent, result, kl = _train(settings, std, overrides, settings['seeds'], (rate,))
    evaluator = Evaluator(agent.policy, ENV, len(settings['seeds']), 20)
    episodes = evaluator(result.state, members.seed_keys(result.members), settings['updates'])
    evaluator.close()
    assert episodes is not None
    return {
        'learning_rate': rate,
        'tuning': by_rate,
        'endpoint': endpoint(kl).tolist(),
        'first': kl[0].tolist(),
        'last': kl[-max(settings['updates'] // 10, 1) :].mean(axis=0).tolist(),
        'largest_rise': largest_rise(kl).tolist(),
        'return_gap': (episodes['return'].mean(axis=1) - _teacher_return()).tolist(),
        'kl': kl.tolist(),
    }


def _teacher_return() -> float:
    """Mean return of the exact mean action on the same 20 start states."""
    env = envs.make(ENV)
    agent = agents.make('topd', env.spec, hidden_sizes=(), teacher_hidden_sizes=())
    states = jax.vmap(lambda key: agent.init(key, {}))(jax.random.split(jax.random.key(0), 1))
    params = jax.tree.map(lambda leaf: leaf[None], exact_teacher(1.0))
    evaluator = Evaluator(agent.policy, ENV, 1, 20)
    episodes = evaluator(states._replace(params={'policy': params}), jax.random.split(jax.random.key(0), 1), 0)
    evaluator.close()
    assert episodes is not None
    return float(episodes['return'].mean())


# --------------------------------------------------------------------------------------------------------------------------- cost


def overhead(timings: int) -> dict[str, Any]:
    """Flops and interleaved times of one update on a fixed rollout, topd_16 against opd_16."""
    env = envs.make(ENV)
    calls, flops = {}, {}
    for arm in ('opd_16', 'topd_16'):
        agent = _agent(env, ARMS[arm])
        state = agent.init(jax.random.key(0), {name: jnp.float32(value) for name, value in agent.hyper.items()})
        shape = (NUM_ENVS, LENGTH)
        fresh = {
            'observations': jax.random.normal(jax.random.key(1), (*shape, 2 * AXES)),
            'extras': {'unsquashed': jax.random.normal(jax.random.key(2), (*shape, AXES))},
            'masks': jnp.ones(shape),
            'truncations': jnp.zeros(shape),
            'valid': jnp.ones(shape),
        }
        compiled = jax.jit(agent.phases['train'].update).lower(state, {'fresh': fresh}, jnp.int32(0), jax.random.key(3)).compile()
        analysis: Any = compiled.cost_analysis()
        flops[arm] = float(analysis['flops'])
        calls[arm] = lambda run=compiled, s=state, f=fresh: jax.block_until_ready(run(s, {'fresh': f}, jnp.int32(0), jax.random.key(3)))
    seconds: dict[str, list[float]] = {arm: [] for arm in calls}
    for call in calls.values():
        call()
    for _ in range(timings):
        for arm, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[arm].append(time.perf_counter() - start)
    ratios = [topd / opd for topd, opd in zip(seconds['topd_16'], seconds['opd_16'], strict=True)]
    return {
        'flops_ratio': flops['topd_16'] / flops['opd_16'],
        'flops_opd_16': flops['opd_16'],
        'time_ratio_median': medians.median(ratios),
        'time_ratio_range': [min(ratios), max(ratios)],
    }


# ------------------------------------------------------------------------------------------------------------------------- claims


def _claim(identifier: str, claim: str, kind: str, outcome: str, scale: str, **figures: Any) -> dict[str, Any]:
    return {
        'id': identifier,
        'claim': claim,
        'kind': kind,
        'basis': 'paper' if not identifier.startswith('ours') else 'our_derivation',
        'outcome': outcome if scale == 'report' else 'not_shown',
        **figures,
        'scale': scale,
        'command': f'python scripts/report.py topd --scale={scale} --out=DIR',
    }


def _gradient_claims(rows: list[dict[str, Any]], scale: str) -> list[dict[str, Any]]:
    claims = []
    for credit in ('joint', 'dimension'):
        ratios = {}
        for column in ('trace', 'snr'):
            by_case = {
                name: [np.median(row[column]) for row in rows if row['credit'] == credit and row['reward'] == name]
                for name in ('opd', 'topd')
            }
            ratios[column] = (np.asarray(by_case['topd']) / np.asarray(by_case['opd'])).tolist()
        text = 'of the whole action' if credit == 'joint' else 'of each action dimension'
        falls, rises = max(ratios['trace']) < 1, min(ratios['snr']) > 1
        prefix = '' if credit == 'joint' else 'ours/'
        claims.append(
            _claim(
                f'{prefix}variance-{credit}', f'the gradient variance {text} falls', 'mechanism', 'confirmed' if falls else 'refuted', scale
            )
            | {'effect': ratios['trace']}
        )
        claims.append(
            _claim(
                f'{prefix}snr-{credit}', f'the signal-to-noise ratio {text} rises', 'mechanism', 'confirmed' if rises else 'refuted', scale
            )
            | {'effect': ratios['snr']}
        )
    return claims


def _claims(curves: dict, scale: str) -> list[dict[str, Any]]:
    claims, tests = [], []
    for teacher in TEACHERS:
        ours = curves[teacher, 'topd_16']
        share, rise = np.asarray(ours['last']) / np.asarray(ours['first']), np.asarray(ours['largest_rise'])
        for name, values, limit in (('convergent', share, 0.05), ('monotone', rise, 1.5)):
            outcome = 'confirmed' if values.max() < limit else 'refuted'
            claims.append(
                _claim(
                    f'{name}/{teacher}', f'topd_16 is {name}', 'mechanism', outcome, scale, effect=float(values.max()), seeds=len(values)
                )
            )
        for column, pairs in (('endpoint', PAIRS), ('largest_rise', PAIRS[:2])):
            for left, right in pairs:
                ours, theirs = (np.asarray(curves[teacher, arm][column]) for arm in (left, right))
                if column == 'largest_rise':
                    ours, theirs = np.log10(ours), np.log10(theirs)
                tests.append((teacher, column, left, right, ours, theirs))
    adjusted = statistics.holm([statistics.wilcoxon(ours, theirs) for *_, ours, theirs in tests])
    for (teacher, column, left, right, ours, theirs), p in zip(tests, adjusted, strict=True):
        interval = statistics.paired_bootstrap_interval(ours, theirs)
        outcome = 'not_shown' if not p < 0.05 else 'confirmed' if interval[1] < 0 else 'refuted' if interval[0] > 0 else 'not_shown'
        what = 'is faster and closer than' if column == 'endpoint' else 'is more stable than'
        figures = {'effect': statistics.iqm(ours - theirs), 'ci95': list(interval), 'p_holm': float(p), 'seeds': len(ours)}
        prefix = '' if left.startswith(('topd_1', 'opd')) else 'ours/'
        claims.append(
            _claim(f'{prefix}{column}/{teacher}/{left}-{right}', f'{left} {what} {right}', 'comparison', outcome, scale, **figures)
        )
    return claims


def _control(curves: dict) -> dict[str, bool]:
    """Positive control: exact beats sampled."""
    return {t: bool(np.mean(curves[t, 'analytic_16']['endpoint']) < np.mean(curves[t, 'opd_16']['endpoint'])) for t in TEACHERS}


def _cost_claim(cost: dict[str, Any], scale: str) -> dict[str, Any]:
    outcome = 'confirmed' if cost['flops_ratio'] < 1.02 else 'refuted'
    return _claim(
        'overhead', 'the proximal teacher costs nothing (under 2% more flops)', 'cost', outcome, scale, effect=cost['flops_ratio']
    )


def _table(gradients: list[dict[str, Any]], curves: dict) -> str:
    lines = ['| d, delta, sigma_T | credit | reward | trace | signal-to-noise | cosine |', '|---|---|---|---|---|---|']
    for row in gradients:
        cells = [f'{row["d"]}, {row["delta"]:g}, {row["std"]:g}', row['credit'], row['reward']]
        lines.append('| ' + ' | '.join(cells + [f'{np.median(row[column]):.3g}' for column in ('trace', 'snr', 'cosine')]) + ' |')
    header = 'mean log10 KL [95% interval] | last KL, worst seed | largest rise, worst seed | return - teacher'
    lines += ['', f'| teacher | arm | learning rate | {header} |']
    lines.append('|---|---|---|---|---|---|---|')
    for (teacher, arm), cell in curves.items():
        summary = statistics.summarise(cell['endpoint'])
        cells = [
            teacher,
            arm,
            f'{cell["learning_rate"]:g}',
            f'{summary["iqm"]:.2f} [{summary["ci95"][0]:.2f}, {summary["ci95"][1]:.2f}]',
            f'{np.mean(cell["last"]):.3g}, {np.max(cell["last"]):.3g}',
            f'{np.median(cell["largest_rise"]):.2f}, {np.max(cell["largest_rise"]):.3g}',
            f'{np.mean(cell["return_gap"]):.3f}',
        ]
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines) + '\n'


def _plot(curves: dict, path: Path) -> None:
    figure, axes = plt.subplots(1, len(TEACHERS), figsize=(12, 5), sharey=True, squeeze=False)
    for axis, teacher in zip(axes[0], TEACHERS, strict=True):
        for arm in ARMS:
            kl = np.asarray(curves[teacher, arm]['kl'])
            axis.plot(np.median(kl, axis=1), label=arm, linestyle='--' if arm.startswith('opd') else '-')
        axis.set(yscale='log', title=f'{teacher} teacher (std {TEACHERS[teacher]:g})', xlabel='update (256 environment steps each)')
    axes[0][0].set_ylabel('KL(student || teacher) on visited states, nats')
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)
