"""GPU: the Triton body over latents and rotary keys (`_common/flash_gpu.py`)."""

import jax

from pallas_kernels._common import flash_gpu
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.tiles import GpuTiles
from pallas_kernels._common.visibility import Visibility
from pallas_kernels.latent_attention.tuning import gpu_tiles

MAX_WIDTH = 512


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
    interpret: bool = False,
    tiles: GpuTiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `op.latent_attention`."""
    B, T, N, _ = query_latent.shape
    latent, rope_key = latent.native(), rope_key.native()
    if tiles is None:
        S = key_positions.shape[1]
        tiles = gpu_tiles(latent, rope_key, B, T * N, S, uniform=T == 1)
    return flash_gpu.attention(
        [query_latent, query_rope],
        [latent, rope_key],
        None,
        visibility,
        key_positions,
        page_table=page_table,
        scale=scale,
        softcap=softcap,
        key_rotation=key_rotation,
        rotated=1,
        tiles=tiles,
        interpret=interpret,
        name="latent_attention",
    )


def unsupported(latent: Operand, rope_key: Operand) -> str | None:
    """What keeps this kernel from such operands, or None."""
    for name, operand in (("latents", latent), ("rotary keys", rope_key)):
        if operand.payload_width > MAX_WIDTH:
            return (
                f"{name} up to {MAX_WIDTH} (in one run of codes) fit into registers, "
                f"got {operand.payload_width}"
            )
    return None
