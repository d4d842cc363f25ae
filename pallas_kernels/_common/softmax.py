"""Parts of the online softmax that more than one implementation uses."""

import jax
import jax.numpy as jnp

from pallas_kernels._common.products import product

MOST_SLOTS = 4096.0  # of a block: counts below it are exact beside multiples of it in f32


def mix_around(weights, values, seen, narrow: bool) -> jax.Array:
    """Weights times values of which some are not finite: they reach only the rows that see them.

    Args:
        weights: f32[rows, S], 0 where not seen.
        values: [S, W].
        seen: bool[rows, S].
        narrow: see `product`.
    """
    wide = values.astype(jnp.float32)
    finite = jnp.abs(wide) < jnp.inf
    clean = jnp.where(finite, wide, 0.0).astype(values.dtype)
    return spoil(product(weights, clean, narrow=narrow), seen, wide)


def spoil(output: jax.Array, seen: jax.Array, values: jax.Array) -> jax.Array:
    """Put NaN and infinities where a query sees a value that holds them.

    Args:
        output: f32[rows, W], the mix of the finite values.
        seen: bool[rows, S].
        values: f32[S, W].
    """
    rows = seen.astype(jnp.bfloat16)
    assert values.shape[0] < MOST_SLOTS

    def count(holds):
        return product(rows, holds.astype(jnp.bfloat16), narrow=True)

    # Two counts in one product, since matrix units of a GPU have little memory of their own.
    both = count(jnp.where(values != values, 1.0, jnp.where(values == jnp.inf, MOST_SLOTS, 0.0)))
    infinities = jnp.floor(both / MOST_SLOTS)
    nan, high = both > infinities * MOST_SLOTS, infinities > 0
    low = count(jnp.where(values == -jnp.inf, 1.0, 0.0)) > 0
    output = jnp.where(high, jnp.inf, jnp.where(low, -jnp.inf, output))
    return jnp.where(nan | (high & low), jnp.nan, output)


def merge_splits(output: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge attention over disjoint parts along a leading axis, by log-sum-exp.

    Args:
        output: f32[splits, ..., W].
        lse: f32[splits, ...].
    """
    if lse.shape[0] == 1:
        return output[0], lse[0]
    top = lse.max(0)
    safe = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lse - safe[None])
    total = weights.sum(0)
    empty = total == 0
    divisor = jnp.where(empty, 1.0, total)
    mixed = (weights[..., None] * output).sum(0) / divisor[..., None]
    return mixed, jnp.where(empty, -jnp.inf, safe + jnp.log(divisor))


def with_sinks(output: jax.Array, lse: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Add a logit without a value to each softmax: it only takes weight from the others.

    Args:
        output: f32[..., N, W].
        lse: f32[..., N].
        logits: f32[N].
    """
    total = jnp.logaddexp(lse, jnp.broadcast_to(logits, lse.shape))
    return output * jnp.exp(lse - total)[..., None], total
