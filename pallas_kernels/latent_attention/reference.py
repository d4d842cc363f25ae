"""What the op means: decode everything, mask, softmax. Plain jnp in f32, no tiles."""

import jax
import jax.numpy as jnp

from pallas_kernels._common.operand import Operand
from pallas_kernels._common.rotation import angles_of, rotate
from pallas_kernels._common.visibility import Visibility


def latent_attention(
    query_latent: jax.Array,  # [B, T, N, C]
    query_rope: jax.Array,  # [B, T, N, R]
    latent: Operand,
    rope_key: Operand,
    visibility: Visibility,
    key_positions: jax.Array,  # i32[B, S]
    *,
    page_table,
    scale,
    softcap,
    key_rotation,
) -> tuple[jax.Array, jax.Array]:
    """See `op.latent_attention`."""
    _, S = key_positions.shape
    c = latent.load(0, S, page_table).astype(jnp.float32)
    r = rope_key.load(0, S, page_table).astype(jnp.float32)
    if key_rotation is not None:
        offsets = key_positions - key_rotation.base[:, None]
        r = rotate(r, angles_of(offsets, key_rotation.inverse_frequencies))
    q_latent, q_rope = (q.astype(jnp.float32) for q in (query_latent, query_rope))
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("BTNC,BSC->BTNS", q_latent, c)
        scores = (scores + jnp.einsum("BTNR,BSR->BTNS", q_rope, r)) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    mask = visibility.mask(key_positions)[:, :, None, :]
    scores = jnp.where(mask, scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    empty = total == 0
    # Term by term: a latent that a query does not see is left out, whatever it holds.
    shares = (weights / jnp.where(empty, 1.0, total))[..., None]
    output = jnp.where(mask[..., None], shares * c[:, None, None], 0.0).sum(-2)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(jnp.where(empty, 1.0, total)))
    return output, lse[..., 0]
