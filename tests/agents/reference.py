"""One update of QAM or TRQAM, written out slowly in float64 numpy-style JAX: no scan, no batching over flow steps, no shared code."""

import jax
import jax.numpy as jnp
import numpy as np


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def perceptron(params, x, layer_norm):
    layers = sorted(name for name in params if name.startswith('Dense'))
    for index, name in enumerate(layers):
        x = x @ params[name]['kernel'] + params[name]['bias']
        if index < len(layers) - 1:
            x = gelu(x)
            if layer_norm:
                norm = params[f'LayerNorm_{index}']
                mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
                x = (x - mean) / jnp.sqrt(variance + 1e-6) * norm['scale'] + norm['bias']
    return x


def velocity(params, s, x, t):
    (inner,) = params['params'].values()
    return perceptron(inner, jnp.concatenate([s, x, jnp.full((len(s), 1), t)], -1), False)


def critic(params, s, a):
    (inner,) = params['params'].values()
    count = jax.tree.leaves(inner)[0].shape[0]
    members = [jax.tree.map(lambda leaf, k=k: leaf[k], inner) for k in range(count)]
    return jnp.stack([perceptron(member, jnp.concatenate([s, a], -1), True)[:, 0] for member in members])


def losses(params, frozen, targets, batch, noises, setting):
    """Loss terms and path KL. `params` carry the gradient, `frozen` are the same values without."""
    steps, chunk = setting['flow_steps'], setting['horizon_length']
    h = 1 / steps
    s, s_next = batch['observations'][:, 0], batch['next_observations'][:, -1]
    actions = batch['actions'].reshape(len(s), -1)
    valid = batch['valid'][:, -1]

    a = noises['next_actions'][0]
    for k in range(steps):
        a = a + velocity(frozen['tuned'], s_next, a, k / steps) / steps
    q_next = critic(targets['critic'], s_next, jnp.clip(a, -1, 1))
    value = q_next.mean(0) - setting['pessimism'] * jnp.sqrt(((q_next - q_next.mean(0)[None]) ** 2).mean(0))
    returns, alive = jnp.zeros(len(s)), jnp.ones(len(s))
    for i in range(chunk):
        returns = returns + setting['discount'] ** i * alive * batch['valid'][:, i] * batch['rewards'][:, i]
        alive = alive * jnp.where(batch['valid'][:, i] > 0, batch['masks'][:, i], 1.0)
    y = returns + setting['discount'] ** chunk * alive * value
    loss_q = (valid[None] * (critic(params['critic'], s, actions) - y[None]) ** 2).mean()

    t = noises['times']
    x_t = (1 - t) * noises['clone'] + t * actions
    (inner,) = params['base']['params'].values()
    predicted = perceptron(inner, jnp.concatenate([s, x_t, t], -1), False)
    loss_bc = (valid * ((predicted - (actions - noises['clone'])) ** 2).mean(-1)).mean()

    xs, x = [], noises['path']
    for k in range(steps):
        xs.append(x)
        g2 = 2 * (1 - k / steps + h) / (k / steps + h)
        if k < steps - 1:
            x = x + h * (2 * velocity(frozen['tuned'], s, x, k / steps) - x / (k / steps + h)) + jnp.sqrt(h * g2) * noises['path_steps'][k]
        else:
            x = x + h * velocity(targets['base'], s, x, k / steps)
    adjoint = -setting['adjoint_scale'] * jax.grad(lambda x: critic(targets['critic'], s, jnp.clip(x, -1, 1)).mean(0).sum())(x)
    loss_am, kl = 0.0, 0.0
    for k in reversed(range(steps)):
        drift = lambda x, k=k: 2 * velocity(targets['base'], s, x, k / steps + h) - x / (k / steps + h)  # noqa: E731
        adjoint = adjoint + h * jax.vjp(drift, xs[k])[1](adjoint)[0]
        g2 = 2 * (1 - k / steps + h) / (k / steps + h)
        sigma = jnp.sqrt(g2 / setting['lambda'])
        gap = velocity(params['tuned'], s, xs[k], k / steps) - velocity(targets['base'], s, xs[k], k / steps)
        loss_am = loss_am + ((2 * gap / sigma + sigma * adjoint) ** 2).sum(-1).mean()
        kl = kl + (2 * h / g2 * (gap**2).sum(-1)).mean()
    return loss_q + loss_bc + loss_am, {'critic': loss_q, 'clone': loss_bc, 'matching': loss_am, 'kl': kl / chunk}


def update(params, targets, moments, batch, noises, setting):
    """One step in float64. moments: (count of earlier steps, mu, nu) of Adam.

    Returns (params, targets, mu, loss terms).
    """
    (_, terms), grads = jax.value_and_grad(losses, has_aux=True)(params, params, targets, batch, noises, setting)
    norm = jnp.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, setting['max_grad_norm'] / norm), grads)
    count, mu, nu = moments
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, nu, grads)

    def adam(param, m, v):
        return param - setting['learning_rate'] * (m / (1 - 0.9 ** (count + 1))) / (jnp.sqrt(v / (1 - 0.999 ** (count + 1))) + 1e-8)

    new = jax.tree.map(adam, params, mu, nu)
    moved = {
        name: jax.tree.map(lambda target, param: target * (1 - setting['tau']) + param * setting['tau'], targets[name], new[name])
        for name in targets
    }
    return new, moved, mu, {**terms, 'norm': norm}
