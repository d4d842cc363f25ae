"""Tile sizes: one heuristic a backend."""

import math

from jax.experimental import pallas as pl

from pallas_kernels._common.operand import Operand
from pallas_kernels._common.tiles import GpuTiles, TpuTiles, count_splits

VMEM_BUDGET = 6 * 2**20  # bytes of one buffered block of keys and values; there are two of each


def gpu_tiles(
    key: Operand, value: Operand, heads: int, rows: int, S: int, *, wide: bool, rotated: bool
) -> GpuTiles:
    """Tiles for `rows` query rows of each of `heads` = B * K stored heads over S slots.

    Tiles of keys, values, scores and outputs stay in the registers of 4 or 8 warps: the more a slot
    takes there, the shorter are blocks and the fewer are rows (the compile matrix shows registers
    and spills).

    Args:
        wide: the model computes in f32.
        rotated: keys are rotated on read.
    """
    encoded = max(len(key.parts), len(value.parts)) > 1
    small = max(key.width, value.width) <= 128
    if small:
        many_groups = encoded and min(key.format.runs, value.format.runs) == 1
        most_rows = 32 if wide or many_groups else 64
    else:
        most_rows = 16 if wide or encoded or rotated else 32
    rows_tile = min(most_rows, max(16, pl.next_power_of_2(rows)))
    plain = not (wide or encoded or rotated)
    if rows_tile == 16 and small and not rotated:
        block = 64 if plain else 32
    elif plain and (small or rows_tile == 16):
        block = 32
    else:
        block = 16
    num_warps = 4 if encoded and rows_tile == 16 and not rotated else 8
    block = min(block, max(16, pl.next_power_of_2(S)))
    per_slot = key.bytes_per_slot + value.bytes_per_slot
    per_split = rows * ((4 if wide else 2) * key.width + 4 * value.width)
    splits = count_splits(heads * -(-rows // rows_tile), S, per_slot, per_split)
    return GpuTiles(rows=rows_tile, block=block, splits=splits, num_warps=num_warps)


def tpu_tiles(key: Operand, value: Operand, K: int, rows: int, S: int, stored: int) -> TpuTiles:
    """Tiles for `rows` query rows of each of K stored heads over the first S of `stored` slots.

    A block holds all heads, so that one fetch is large, unless that would not fit into VMEM.
    """
    grouped = {r for x in (key, value) for r in x.tokens_per_row if r > 1}
    unit = math.lcm(128, key.unit, value.unit, *(8 * r for r in grouped))
    block = max(unit, min(256, -(-S // unit) * unit) // unit * unit)
    block = min(block, stored)
    lanes = sum(128 * -(-x.payload_width // 128) * x.parts[0].dtype.itemsize for x in (key, value))
    heads = K
    while heads > 1 and (heads * block * lanes > VMEM_BUDGET or K % heads):
        heads -= 1
    return TpuTiles(rows=min(128, -(-rows // 8) * 8), block=block, heads=heads)
