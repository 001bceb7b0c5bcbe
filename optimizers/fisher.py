"""Estimates of the Fisher information from PER-SAMPLE gradients, and the exact Gauss-Newton matrix of small networks.

Squaring the gradient of a batch mean, as some public code does, is another number. `loss(params, sample) -> []` is minus the log
likelihood of one sample without a batch dimension; with targets from the data the estimate is the empirical Fisher, with targets drawn from
the model it is the Fisher itself. Each result goes with a form of `optimizers/metrics.py`.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from optimizers.metrics import Kronecker, RankOne

Loss = Callable[[Any, Any], Array]


def _count(batch: Any) -> int:
    """Samples in a batch with leaves [N, ...]."""
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f'a batch needs one common number of samples above 0, not {sorted(sizes)}')
    return sizes.pop()


def _mean_over_samples(function: Callable[[Any], Any], batch: Any, microbatch: int) -> Any:
    """Mean of function(sample) over a batch with leaves [N, ...], `microbatch` samples at a time."""
    count = _count(batch)
    if microbatch < 1:
        raise ValueError(f'microbatch={microbatch} must be 1 or more')
    batch = jax.tree.map(jnp.asarray, batch)  # traced rows are picked below, which NumPy arrays don't allow
    microbatch = min(microbatch, count)
    blocks = -(-count // microbatch)
    picks = jnp.minimum(jnp.arange(blocks * microbatch), count - 1).reshape(blocks, microbatch)
    exists = (jnp.arange(blocks * microbatch) < count).reshape(blocks, microbatch)

    def add(total: Any, inputs: tuple[Array, Array]) -> tuple[Any, None]:
        rows, mask = inputs
        values = jax.vmap(function)(jax.tree.map(lambda leaf: leaf[rows], batch))
        sums = jax.tree.map(lambda v: jnp.tensordot(mask.astype(v.dtype), v, axes=1, precision='highest'), values)
        return jax.tree.map(jnp.add, total, sums), None

    shapes = jax.eval_shape(function, jax.tree.map(lambda leaf: leaf[0], batch))
    total, _ = jax.lax.scan(add, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), (picks, exists))
    return jax.tree.map(lambda leaf: leaf / count, total)


def diagonal(loss: Loss, params: Any, batch: Any, *, microbatch: int = 32) -> Any:
    """Mean of the squared per-sample gradients: a tree like the parameters, for `diagonal_form`.

    Args:
      loss: see the module.
      params: tree.
      batch: leaves [N, ...].
      microbatch: samples whose gradients exist at the same time.
    """
    return _mean_over_samples(lambda sample: jax.tree.map(jnp.square, jax.grad(loss)(params, sample)), batch, microbatch)


def rank_one(loss: Loss, params: Any, batch: Any, *, microbatch: int = 32) -> RankOne:
    """c mu mu^T with mu the mean gradient and c = E[(mu^T g)^2] / |mu|^4, for `rank_one_form`. c = 0 where mu = 0.

    Source: 'Avoid catastrophic forgetting with rank-1 Fisher from diffusion models', 2509.23593, section 3.
    """
    mean = _mean_over_samples(lambda sample: jax.grad(loss)(params, sample), batch, microbatch)
    norm = optax.tree.norm(mean)
    nonzero = jnp.where(norm > 0, norm, 1.0)
    unit = jax.tree.map(lambda leaf: leaf / nonzero, mean)  # |mu|^4 would underflow for gradients of 1e-10
    # mu^T g is the derivative of the loss along mu, so no gradient of a sample need be kept.
    squares = _mean_over_samples(
        lambda sample: jnp.square(jax.jvp(lambda each: loss(each, sample), (params,), (unit,))[1]), batch, microbatch
    )
    return RankOne(mean, squares / jnp.square(nonzero))


def low_rank(loss: Loss, params: Any, batch: Any, *, rank: int) -> Any:
    """Factors u [rank, ...] of the best approximation sum_r u_r u_r^T of the Fisher, for `low_rank_form`.

    The N x N Gram matrix of all per-sample gradients is decomposed, so N x P numbers exist at once; N of a few hundred is meant.

    Raises:
      ValueError: rank outside 1 .. N, or a batch without a common number of samples.
    """
    count = _count(batch)
    if not 1 <= rank <= count:
        raise ValueError(f'rank={rank} must be between 1 and the {count} samples')
    gradients = jax.vmap(lambda sample: jax.grad(loss)(params, sample))(batch)
    leaves = [leaf.reshape(count, -1) for leaf in jax.tree.leaves(gradients)]
    gram = sum(jnp.matmul(leaf, leaf.T, precision='highest') for leaf in leaves) / count
    vectors = jnp.linalg.eigh(gram)[1][:, ::-1][:, :rank]
    # With gram v = s v the vector G^T v / sqrt(N) has squared norm s: it is the factor itself.
    return jax.tree.map(lambda leaf: jnp.tensordot(vectors.T, leaf, axes=1, precision='highest') / jnp.sqrt(count), gradients)


def kronecker(loss: Loss, params: Any, batch: Any, *, microbatch: int = 32) -> dict[str, Kronecker]:
    """Factors A = E[a a^T] and G = E[g g^T] of every dense layer, for `kronecker_form`.

    a is the layer's input, with a 1 behind it if it has a bias; g is the gradient at its output.

    Args:
      loss: applies one Flax network, each `nn.Dense` in it once per sample, to inputs without a batch dimension.
      params: of that network.
      batch: leaves [N, ...].
      microbatch: samples at a time.

    Raises:
      ValueError: a dense layer is called twice.

    Source: Martens and Grosse 2015 (1503.05671).
    """

    def record(sample: Any) -> tuple[dict[str, Array], dict[str, Array]]:
        """Inputs and output gradients of all dense layers for one sample."""
        shapes: dict[str, Any] = {}
        jax.eval_shape(lambda: _with_layers(loss, params, sample, lambda name, inputs, output: shapes.setdefault(name, output)))
        shifts = {name: jnp.zeros(output.shape, output.dtype) for name, output in shapes.items()}

        def shifted(shifts: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
            seen: dict[str, Array] = {}

            def visit(name: str, inputs: Array, output: Array) -> Array:
                seen[name] = inputs
                return output + shifts[name]

            return _with_layers(loss, params, sample, visit), seen

        gradients, seen = jax.grad(shifted, has_aux=True)(shifts)
        return seen, gradients

    def factors(sample: Any) -> dict[str, Kronecker]:
        seen, gradients = record(sample)
        return {name: Kronecker(jnp.outer(seen[name], seen[name]), jnp.outer(g, g)) for name, g in gradients.items()}

    return _mean_over_samples(factors, batch, microbatch)


def _with_layers(loss: Loss, params: Any, sample: Any, visit: Callable[[str, Array, Array], Array]) -> Array:
    """loss(params, sample), with visit(path, input, output) in the place of every dense layer's output."""
    visited: set[str] = set()

    def intercept(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        output = call(*args, **kwargs)
        if not isinstance(context.module, nn.Dense) or context.method_name != '__call__':
            return output
        name = '/'.join(context.module.path)
        if name in visited:
            raise ValueError(f'dense layer {name} is called twice: Kronecker factors need one call per sample')
        visited.add(name)
        inputs = args[0]
        return visit(name, jnp.append(inputs, 1.0) if context.module.use_bias else inputs, output)

    with nn.intercept_methods(intercept):
        return loss(params, sample)


def gauss_newton(outputs: Callable[[Any, Any], Array], params: Any, batch: Any, *, microbatch: int = 32) -> Array:
    """E[J^T J], [P, P]: exactly the Fisher of a unit-variance Gaussian around `outputs(params, sample) -> [M]`.

    For a few thousand parameters. Rows and columns are in the order of `jax.flatten_util.ravel_pytree(params)`.
    """
    flat, unravel = ravel_pytree(params)

    def product(sample: Any) -> Array:
        jacobian = jax.jacrev(lambda each: outputs(unravel(each), sample))(flat)
        return jnp.matmul(jacobian.T, jacobian, precision='highest')

    return _mean_over_samples(product, batch, microbatch)
