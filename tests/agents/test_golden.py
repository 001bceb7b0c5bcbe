"""Numbers that the official QAM and TRQAM code gave for the inputs of golden_inputs.py (parameters copied, noises injected).

QAM: ColinQiyangLi/qam at f93efd22520a79f6819f458dffe9c075eacc786f. TRQAM: yonghdong/trqam at 02599ce32dc9343f723b1cc52dabe06c5e9c1ed5.
Their `agent.update` ran unmodified, with `jax.random.normal` and `uniform` replaced by the injected noises; T = 4, chunks of 2, three
critics of 6 and 5 units, QAM's inverse temperature 3, everything else at its default.

Two of their habits need a flag here: targets follow the old parameters (`stale_targets`), rewards behind a goal count inside a chunk
(`count_after_terminal`). Differences that these numbers cannot show:
- they draw x_0 and the step noises of the path from one key, twice; here from two keys. Both sides get the injected noises;
- their Adam also runs over the target networks, whose gradients are 0; here over what trains. The clipped norm is the same;
- their samplers give cumulated rewards and running masks, which were made from our batch with their formula;
- their 'grad/norm' is the sum of the tensors' norms, ours the norm of all: MOMENTS compares the gradients themselves.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import agents
from envs.types import ArraySpec, Spec

GOLDEN = {
    'qam': {
        'critic/loss': 7.3019609451293945,
        'actor/clone_loss': 2.5506553649902344,
        'actor/matching_loss': 7.92426061630249,
        'critic/value_mean': -0.31136903166770935,
        'critic/value_max': 1.3730758428573608,
        'critic/value_min': -2.2786970138549805,
    },
    'trqam': {
        'critic/loss': 7.358208656311035,
        'actor/clone_loss': 2.5506553649902344,
        'actor/matching_loss': 10.052118301391602,
        'actor/path_kl': 0.20646487176418304,
        'actor/gradient_max': 1.1796692609786987,
        'actor/gradient_mean': 0.22329843044281006,
        'dual/lambda': 2.9706194400787354,
        'dual/kl_average': 0.020646488294005394,
    },
}
# norm and sum of the change of each network by the update
CHANGES = {
    'qam': {
        'critic': (0.0054743122309446335, 0.005098552443087101),
        'target critic': (0.05787566304206848, 0.0037082787603139877),
        'base': (0.003188928123563528, 0.0003001033328473568),
        'target base': (0.037166450172662735, -0.01047410536557436),
        'tuned': (0.0031889735255390406, -0.0003000125288963318),
    },
    'trqam': {
        'critic': (0.005474100820720196, 0.005095604807138443),
        'target critic': (0.05787566304206848, 0.0037082787603139877),
        'base': (0.003188870847225189, 0.00030037807300686836),
        'target base': (0.037166450172662735, -0.01047410536557436),
        'tuned': (0.0031889749225229025, -0.001499958336353302),
    },
}
# norm and sum of Adam's first moment, which is 0.1 times the clipped gradient (the first step itself shows only its sign)
MOMENTS = {
    'qam': {
        'critic': (0.02006436325609684, 0.002148266416043043),
        'base': (0.003422228619456291, -0.001179160550236702),
        'tuned': (0.09790664166212082, 0.055967532098293304),
    },
    'trqam': {
        'critic': (0.00994165614247322, 0.0010508955456316471),
        'base': (0.0016897846944630146, -0.0005822310922667384),
        'tuned': (0.09949024766683578, -0.012394150719046593),
    },
}


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize('name', ['qam', 'trqam'])
def test_official_update(helper, name):
    inputs = helper('agents/golden_inputs.py')
    spec = Spec(ArraySpec((inputs.OBSERVATIONS,)), ArraySpec((inputs.ACTIONS,), -1, 1), 100)
    sizes = {
        'hidden_sizes': (6, 5),
        'critic_hidden_sizes': (6, 5),
        'num_critics': 3,
        'flow_steps': inputs.STEPS,
        'horizon_length': inputs.CHUNK,
    }
    agent = agents.make(name, spec, **sizes, stale_targets=True, count_after_terminal=True)
    state = agent.init(jax.random.key(0), {key: jnp.float32(value) for key, value in agent.hyper.items()})
    params = {key: inputs.fill(state.params[key], phase) for key, phase in (('critic', 10), ('base', 30), ('tuned', 50))}
    targets = {key: inputs.fill(state.target_params[key], phase) for key, phase in (('critic', 20), ('base', 40))}
    state = state._replace(params=params, target_params=targets)
    batches = jax.tree.map(jnp.asarray, {'data': inputs.batch(), 'noises': inputs.noises()})
    new, metrics = jax.jit(agent.phases['train'].update)(state, batches, 0, jax.random.key(0))

    for metric, expected in GOLDEN[name].items():
        np.testing.assert_allclose(float(metrics[metric]), expected, rtol=1e-5, err_msg=metric)
    pairs = {'critic': 'critic', 'base': 'base', 'tuned': 'tuned'}
    changes = {key: (new.params[part], params[part]) for key, part in pairs.items()}
    changes |= {f'target {part}': (new.target_params[part], targets[part]) for part in ('critic', 'base')}
    for key, (after, before) in changes.items():
        difference = flat(after) - flat(before)
        norm, total = CHANGES[name][key]
        np.testing.assert_allclose(np.linalg.norm(difference), norm, rtol=1e-4, err_msg=key)
        np.testing.assert_allclose(difference.sum(), total, atol=2e-6, err_msg=key)
    for key, (norm, total) in MOMENTS[name].items():
        moment = flat(new.opt_state[0].mu[key])
        np.testing.assert_allclose(np.linalg.norm(moment), norm, rtol=1e-5, err_msg=key)
        np.testing.assert_allclose(moment.sum(), total, atol=1e-5 * norm, err_msg=key)
