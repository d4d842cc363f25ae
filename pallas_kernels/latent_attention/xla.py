"""The fast portable path: XLA alone; its cost follows the live length, not the capacity.

`online.streamed` walks blocks of slots with an online softmax. A block is loaded or decoded once
and enters two products with the rows of all heads, as keys and as values: nothing is repeated per
head, and no decoded cache is ever formed.
"""

import math

import jax

from pallas_kernels._common import online
from pallas_kernels._common.operand import Operand
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
    B, T, N, C = query_latent.shape
    R = query_rope.shape[-1]
    q_latent, q_rope = query_latent.reshape(B, T * N, C), query_rope.reshape(B, T * N, R)

    def load(start, size: int):
        r = rope_key.load(start, size, page_table)
        if key_rotation is not None:
            positions = online.slice_positions(key_positions, start, size)
            r = online.rotate_keys(r, positions, key_rotation, transposed=False)
        return latent.load(start, size, page_table), r

    def body(c, r, mask):
        scores = online.score(q_latent, c, transposed=False)
        scores += online.score(q_rope, r, transposed=False)
        return online.attend(scores, c, mask, B=B, T=T, scale=scale, softcap=softcap)

    unit = math.lcm(latent.unit, rope_key.unit)
    block = max(unit, online.BLOCK // unit * unit)
    start = online.nothing((B, T * N), C)
    state = online.streamed(body, load, visibility, key_positions, start, block)
    output, lse = online.finish(state)
    return output.reshape(B, T, N, C), lse.reshape(B, T, N)
