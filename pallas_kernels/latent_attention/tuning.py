"""Tile sizes: one heuristic a backend."""

import math

from jax.experimental import pallas as pl

from pallas_kernels._common.operand import Operand
from pallas_kernels._common.tiles import GpuTiles, TpuTiles


def gpu_tiles(
    latent: Operand, rope_key: Operand, B: int, T: int, N: int, S: int, *, narrow: bool
) -> GpuTiles:
    """Tiles for T queries of N heads of each of B sequences over S slots.

    Outputs f32[rows, C] and a block of latents stay in the registers of 8 warps: so 16 rows and 32
    slots, or 16 slots where decoded latents or f32 products are held too, and 32 rows of one query
    where they are not (the compile matrix shows registers and spills). Splits fill the multiprocessors (132 on an H100) twice.
    """
    plain = narrow and all(len(x.parts) == 1 for x in (latent, rope_key))
    rows_tile = 32 if plain and T == 1 and N > 16 else 16
    block = min(32 if plain else 16, max(16, pl.next_power_of_2(S)))
    programs = B * -(-T * N // rows_tile)
    splits = max(1, min(264 // programs, S // (4 * block)))
    return GpuTiles(rows=rows_tile, block=block, splits=splits, num_warps=8)


def tpu_tiles(latent: Operand, rope_key: Operand, rows: int, S: int) -> TpuTiles:
    """Tiles for `rows` query rows over the first S slots.

    All heads share a latent, so up to 128 of them ride on one fetch of it.
    """
    grouped = {r for x in (latent, rope_key) for r in x.tokens_per_row if r > 1}
    unit = math.lcm(128, latent.unit, rope_key.unit, *(8 * r for r in grouped))
    block = max(unit, min(256, -(-S // unit) * unit) // unit * unit)
    return TpuTiles(rows=min(128, -(-rows // 8) * 8), block=min(block, S), heads=1)
