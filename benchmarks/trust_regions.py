"""What each trust-region transform costs beside Adam on a million parameters, and a projection of 512 Gaussian policies."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optimizers import curves, metrics, natural_gradient, project, project_full_gaussian, project_to_trust_region, projected_dual_ascent

REPEATS, LAYERS, WIDTH, STATES, ACTIONS = 15, 4, 500, 512, 6


def run(peer: Path | None) -> dict[str, Any]:
    """Milliseconds and flops per call, all calls taking turns; medians of REPEATS. `peer` is not used: Adam is the yardstick."""
    if peer is not None:
        raise ValueError('benchmark trust_regions has no peer: leave out --peer')
    calls, flops, compile_seconds = {}, {}, {}
    for name, (function, arguments) in _cases().items():
        began = time.perf_counter()
        compiled = jax.jit(function).lower(*arguments).compile()
        compile_seconds[name] = time.perf_counter() - began
        flops[name] = (compiled.cost_analysis() or {}).get('flops')
        calls[name] = lambda run=compiled, given=arguments: jax.block_until_ready(run(*given))
        calls[name]()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    adam = np.asarray(seconds['adam'])
    return {
        'milliseconds': {name: 1e3 * float(np.median(values)) for name, values in seconds.items()},
        'ratio_to_adam': {name: float(np.median(np.asarray(values) / adam)) for name, values in seconds.items()},
        'flops': flops,
        'compile_seconds': compile_seconds,
        'parameters': LAYERS * WIDTH**2,
        'load_average': os.getloadavg(),
        'repeats': REPEATS,
    }


def _cases() -> dict[str, tuple[Callable, tuple]]:
    """{name: (function, arguments)}."""
    keys = jax.random.split(jax.random.key(0), 6)
    params = {str(k): jax.random.normal(keys[0], (WIDTH, WIDTH)) / WIDTH**0.5 for k in range(LAYERS)}
    gradients = jax.tree.map(lambda leaf: 0.01 * leaf, params)
    cases: dict[str, tuple[Callable, tuple]] = {}
    chains = {
        'adam': optax.adam(1e-3),
        'adam + project_to_trust_region': optax.chain(optax.adam(1e-3), project_to_trust_region(1e-3)),
        'adam + project_to_trust_region (rank 4)': optax.chain(
            optax.adam(1e-3),
            project_to_trust_region(1e-3, precision=jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), params), form=metrics.low_rank_form),
        ),
    }
    for name, chain in chains.items():
        cases[name] = (lambda g, s, p, update=chain.update: update(g, s, p), (gradients, chain.init(params), params))

    inputs = jax.random.normal(keys[1], (128, WIDTH))

    def outputs(weights: Any) -> jax.Array:
        values = inputs
        for layer in range(LAYERS):
            values = jnp.tanh(values @ weights[str(layer)])
        return values

    reference = outputs(params)
    step = natural_gradient(1e-2)

    def natural(weights: Any, state: Any) -> Any:
        value = lambda each: jnp.mean(jnp.square(outputs(each) - 1))  # noqa: E731
        distance = lambda each: 0.5 * jnp.mean(jnp.sum(jnp.square(outputs(each) - reference), axis=-1))  # noqa: E731
        return step.update(jax.grad(value)(weights), state, weights, value_fn=value, distance_fn=distance)

    cases['natural_gradient (10 products, batch 128)'] = (natural, (params, step.init(params)))

    dual = projected_dual_ascent(1.0, 0.01, decay=0.9, clip=2.0)
    cases['projected_dual_ascent'] = (dual.update, (dual.init(1.0), jnp.float32(2)))

    policies = tuple(jax.random.normal(key, (STATES, ACTIONS)) for key in keys[2:])
    cases['project: 512 diagonal Gaussians'] = (
        lambda x, anchor: project(metrics.gaussian_kl, curves.gaussian_geodesic, x, anchor, 0.1),
        ((policies[0], 0.3 * policies[1]), (policies[2], 0.3 * policies[3])),
    )
    factor = jax.random.normal(keys[5], (STATES, ACTIONS, ACTIONS))
    covariance = factor @ jnp.swapaxes(factor, 1, 2) + jnp.eye(ACTIONS)[None]
    cases['project_full_gaussian: 512 Gaussians'] = (
        lambda x, anchor: project_full_gaussian(x, anchor, 0.1),
        ((policies[0], covariance), (policies[2], covariance[::-1])),
    )
    return cases
