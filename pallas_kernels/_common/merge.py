"""Exact merge of attention over parts, by log-sum-exp."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp


def merge(parts: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Combine attention over disjoint sets of keys into attention over their union.

    With o_i the normalised output and l_i the log-sum-exp of part i:
    l = log sum_i exp(l_i) and o = sum_i exp(l_i - l) o_i. A part in which a query sees nothing
    has l_i = -inf and adds nothing; if all are empty the output is 0 and l is -inf.

    Args:
        parts: pairs (output f32[..., H], logsumexp f32[...]).

    Returns:
        The pair of the union.
    """
    if len(parts) == 1:
        return parts[0]
    top = parts[0][1]
    for _, lse in parts[1:]:
        top = jnp.maximum(top, lse)
    safe = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = [jnp.exp(lse - safe) for _, lse in parts]
    total = sum(weights[1:], weights[0])
    mixed = sum(
        (w[..., None] * o for w, (o, _) in zip(weights[1:], parts[1:], strict=True)),
        weights[0][..., None] * parts[0][0],
    )
    empty = total == 0
    output = mixed / jnp.where(empty, 1.0, total)[..., None]
    return output, jnp.where(empty, -jnp.inf, safe + jnp.log(jnp.where(empty, 1.0, total)))
