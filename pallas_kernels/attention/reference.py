"""What the op means: decode everything, mask, softmax. Plain jnp in f32, no tiles."""

import jax
import jax.numpy as jnp

from pallas_kernels._common.operand import Operand
from pallas_kernels._common.rotation import angles_of, rotate
from pallas_kernels._common.visibility import Visibility


def attention(
    query: jax.Array,  # [B, T, N, H]
    key: Operand,
    value: Operand,
    visibility: Visibility,
    key_positions: jax.Array,  # i32[B, S]
    *,
    page_table,
    scale,
    softcap,
    key_rotation,
) -> tuple[jax.Array, jax.Array]:
    """See `op.attention`."""
    B, T, N, H = query.shape
    K = key.num_kv_heads(B)
    _, S = key_positions.shape
    k = key.load(0, S, page_table).astype(jnp.float32)
    k = (k.swapaxes(1, 2) if key.transposed else k).reshape(B, K, S, H)
    v = value.load(0, S, page_table).astype(jnp.float32).reshape(B, K, S, value.width)
    if key_rotation is not None:
        offsets = key_positions - key_rotation.base[:, None]
        k = rotate(k, angles_of(offsets, key_rotation.inverse_frequencies)[:, None])
    q = query.astype(jnp.float32).reshape(B, T, K, N // K, H)
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("BTKGH,BKSH->BTKGS", q, k) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        mask = visibility.mask(key_positions)[:, :, None, None, :]
        scores = jnp.where(mask, scores, -jnp.inf)
        top = scores.max(-1, keepdims=True)
        top = jnp.where(jnp.isneginf(top), 0.0, top)
        weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
        total = weights.sum(-1, keepdims=True)
        empty = total == 0
        # Term by term: a value that a query does not see is left out, whatever it holds.
        shares = (weights / jnp.where(empty, 1.0, total))[..., None]
        terms = jnp.where(mask[..., None], shares * v[:, None, :, None], 0.0)
        output = terms.sum(-2)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))
    return output.reshape(B, T, N, value.width), lse.reshape(B, T, N)
