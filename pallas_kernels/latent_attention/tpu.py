"""TPU: the Mosaic body over latents and rotary keys (`_common/flash_tpu.py`)."""

import jax

from pallas_kernels._common import flash_tpu
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.tiles import TpuTiles
from pallas_kernels._common.visibility import Visibility
from pallas_kernels.latent_attention.tuning import tpu_tiles


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
    interpret=False,
    tiles: TpuTiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `op.latent_attention`."""
    _, T, N, _ = query_latent.shape
    latent, rope_key = latent.native(), rope_key.native()
    return flash_tpu.attention(
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
        tiles=tiles or tpu_tiles(latent, rope_key, T * N, key_positions.shape[1]),
        interpret=interpret,
        name="latent_attention",
    )


def unsupported(latent: Operand, rope_key: Operand) -> str | None:
    """What keeps this kernel from such operands, or None."""
    if latent.paged and latent.page_size % 8:
        return f"pages are multiples of 8 tokens (sublanes of a tile), got {latent.page_size}"
    return None
