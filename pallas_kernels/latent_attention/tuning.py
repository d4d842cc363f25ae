"""Tile sizes: one heuristic a backend."""

import math

from jax.experimental import pallas as pl

from pallas_kernels._common.operand import Operand
from pallas_kernels._common.tiles import GpuTiles, TpuTiles, count_splits


def gpu_tiles(
    latent: Operand, rope_key: Operand, B: int, rows: int, S: int, *, uniform: bool = True
) -> GpuTiles:
    """Tiles for `rows` query rows of each of B sequences over S slots.

    Outputs f32[rows, C] and a block of latents stay in the registers of 8 warps: so 16 rows and 32
    slots, or 16 slots where latents are decoded, f32 or of many tokens, and 32 rows where they are
    not (the compile matrix shows registers and spills).

    Args:
        uniform: all rows are of one token, so they see the same.
    """
    parts = (*latent.parts, *rope_key.parts)
    plain = len(parts) == 2 and all(part.dtype.itemsize <= 2 for part in parts)
    rows_tile = 32 if plain and uniform and rows > 16 else 16
    block = min(32 if plain and uniform else 16, max(16, pl.next_power_of_2(S)))
    programs = B * -(-rows // rows_tile)
    per_slot = latent.bytes_per_slot + rope_key.bytes_per_slot
    per_split = rows * (6 * latent.width + 2 * rope_key.width)
    splits = count_splits(programs, S, per_slot, per_split)
    stages = 1 if latent.parts[0].dtype.itemsize == 4 else 2  # two of f32 would not fit an sm_120
    return GpuTiles(rows=rows_tile, block=block, splits=splits, num_stages=stages, num_warps=8)


def tpu_tiles(latent: Operand, rope_key: Operand, rows: int, S: int) -> TpuTiles:
    """Tiles for `rows` query rows over the first S slots.

    All heads share a latent, so up to 128 of them ride on one fetch of it.
    """
    grouped = {r for x in (latent, rope_key) for r in x.tokens_per_row if r > 1}
    unit = math.lcm(128, latent.unit, rope_key.unit, *(8 * r for r in grouped))
    block = max(unit, min(256, -(-S // unit) * unit) // unit * unit)
    return TpuTiles(rows=min(128, -(-rows // 8) * 8), block=min(block, S), heads=1)
