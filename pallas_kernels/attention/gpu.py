"""GPU: the Triton body over keys and values (`_common/flash_gpu.py`)."""

import jax
import jax.numpy as jnp

from pallas_kernels._common import flash_gpu
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.tiles import GpuTiles
from pallas_kernels._common.visibility import Visibility
from pallas_kernels.attention.tuning import gpu_tiles

MAX_WIDTH = 256


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
    interpret: bool = False,
    tiles: GpuTiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `op.attention`."""
    B, T, N, _ = query.shape
    K = key.num_kv_heads(B)
    key, value = key.native(), value.native()
    if tiles is None:
        S, wide = key_positions.shape[1], query.dtype == jnp.float32
        rotated = key_rotation is not None
        tiles = gpu_tiles(key, value, B * K, T * N // K, S, wide=wide, rotated=rotated)
    return flash_gpu.attention(
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
    widest = max(key.payload_width, value.payload_width)
    if widest > MAX_WIDTH:
        return f"head dims up to {MAX_WIDTH} (in one run of codes) fit into registers, got {widest}"
    return None
