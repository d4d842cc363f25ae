"""TPU: the Mosaic body over keys and values (`_common/flash_tpu.py`)."""

import jax

from pallas_kernels._common import flash_tpu
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.tiles import TpuTiles
from pallas_kernels._common.visibility import Visibility
from pallas_kernels.attention.tuning import tpu_tiles


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
    interpret=False,
    tiles: TpuTiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `op.attention`."""
    B, T, N, _ = query.shape
    K = key.num_kv_heads(B)
    key, value = key.native(), value.native()
    if tiles is None:
        stored, S = key.num_slots(page_table), key_positions.shape[1]
        tiles = tpu_tiles(key, value, K, T * N // K, S, stored)
    return flash_tpu.attention(
        [query],
        [key],
        value,
        visibility,
        key_positions,
        page_table=page_table,
        scale=scale,
        softcap=softcap,
        key_rotation=key_rotation,
        rotated=0,
        tiles=tiles,
        interpret=interpret,
        name="attention",
    )


def unsupported(key: Operand, value: Operand) -> str | None:
    """What keeps this kernel from such operands, or None."""
    if key.paged and key.page_size % 8:
        return f"pages are multiples of 8 tokens (sublanes of a tile), got {key.page_size}"
    return None
