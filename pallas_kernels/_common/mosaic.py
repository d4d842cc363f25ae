"""Parts of Mosaic (TPU) kernels: fetching blocks of an operand, decoding, rotation."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common.affine import Groups, Tile
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.products import product


class Fetcher:
    """Block specs of an operand's parts, and how a fetched block becomes values.

    Attributes:
        count: arrays that the kernel gets for this operand.
        runs, width: a decoded block is one [block, width] tile for each run.
    """

    def __init__(self, operand: Operand, B: int, K: int, heads: int, block: int, narrow: bool):
        self.narrow = narrow
        self.operand, self.B, self.K, self.heads, self.block = operand, B, K, heads, block
        self.transposed, self.paged = operand.transposed, operand.paged
        self.runs, self.width = operand.format.runs, operand.payload_width
        self.pages = block // operand.page_size if operand.paged else 1
        spans = [(r * self.width, self.width) for r in range(self.runs)]
        self.groups = Groups(operand, spans)
        self.count = self.pages * len(operand.parts)

    def arguments(self) -> list[jax.Array]:
        """Arrays in the order of `specs`."""
        parts = [_words(part) for part in self.operand.parts]
        if not self.paged:
            parts = [part.reshape(self.B, self.K, *part.shape[1:]) for part in parts]
        return [part for part in parts for _ in range(self.pages)]

    def pad_table(self, table: jax.Array, num_blocks: int) -> jax.Array:
        """Page ids within the pool, for whole blocks; entries of dead pages point anywhere."""
        pages = self.operand.parts[0].shape[0]
        wanted = num_blocks * self.pages
        table = jnp.clip(table[:, :wanted], 0, pages - 1)
        return jnp.pad(table, ((0, 0), (0, wanted - table.shape[1])))

    def specs(self) -> list[pl.BlockSpec]:
        """One for each part and page; maps get (b, head group, tile, i, index, count, table)."""
        specs = []
        for part, r in zip(self.operand.parts, self.operand.tokens_per_row, strict=True):
            if self.paged:
                *_, rows, W = part.shape
                shape = (1, self.heads, rows, W)
                specs += [pl.BlockSpec(shape, self._page_map(n)) for n in range(self.pages)]
            elif self.transposed:
                shape = (1, self.heads, part.shape[1], self.block)
                specs.append(
                    pl.BlockSpec(shape, lambda b, h, t, i, index, *_: (b, h, 0, index[b, t, i]))
                )
            else:
                shape = (1, self.heads, self.block // r, part.shape[2])
                specs.append(
                    pl.BlockSpec(shape, lambda b, h, t, i, index, *_: (b, h, index[b, t, i], 0))
                )
        return specs

    def _page_map(self, n: int):
        def page(b, h, t, i, index, count, table):
            return table[b, index[b, t, i] * self.pages + n], h, 0, 0

        return page

    def load(self, refs, k) -> list[Tile]:
        """A tile of head k for each run: levels where products take the scales, else values."""
        if not self.groups.stacked:
            return [Tile(x) for x in self.values(refs, k)]
        payload, *rows = self._parts(refs, k)
        tiles = []
        for run in range(self.runs):
            scales, *zeros = (self._group_rows(x, run) for x in rows)
            levels = self.operand.format.levels(payload, run)
            masks = self.groups.masks(run, self.width)
            tiles.append(Tile(levels, scales, zeros[0] if zeros else (), masks))
        return tiles

    def values(self, refs, k) -> list[jax.Array]:
        """Decoded values of head k, [block, width] (or transposed), for each run."""
        operand = self.operand
        payload, *rows = self._parts(refs, k)
        channels = operand.format.channels_per_column(operand.width)
        rows = [
            _repeat_rows(x, payload.shape[0], r, self.narrow)
            for x, r in zip(rows, operand.tokens_per_row[1:], strict=True)
        ]
        tiles = []
        for run in range(self.runs):
            values = operand.format.levels(payload, run)
            for i, (x, c) in enumerate(zip(rows, channels, strict=True)):
                spread = _spread_columns(x, self.width, run * self.width, c, self.narrow)
                values = values.astype(jnp.float32)
                values = values * spread if i == 0 else values + spread
            tiles.append(values)
        return tiles

    def _parts(self, refs, k) -> list[jax.Array]:
        """Whole parts of head k, [block / r, W] each; garbage of dead slots made finite."""
        parts = []
        for i, dtype in enumerate(self.operand.dtypes):
            pages = refs[i * self.pages : (i + 1) * self.pages]
            tiles = [_as_numbers(page[0, k], dtype) for page in pages]
            part = tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=0)
            parts.append(part if i == 0 else jnp.where(jnp.abs(part) < jnp.inf, part, 0.0))
        return parts

    def _group_rows(self, x: jax.Array, run: int) -> tuple[jax.Array, ...]:
        """Columns of the run's groups as rows, [1, block] each, by a product with 0 and 1."""
        shape = (self.groups.count, self.groups.columns)
        group = lax.broadcasted_iota(jnp.int32, shape, 0) + self.groups.first(run)
        chosen = (group == lax.broadcasted_iota(jnp.int32, shape, 1)).astype(jnp.bfloat16)
        rows = product(chosen, x, narrow=self.narrow, transposed=True)
        return tuple(rows[i : i + 1] for i in range(self.groups.count))


def _repeat_rows(x: jax.Array, rows: int, r: int, narrow: bool) -> jax.Array:
    """Each row r times: [rows / r, W] to [rows, W]."""
    if r == 1:
        return x
    token = lax.broadcasted_iota(jnp.int32, (rows, rows // r), 0)
    group = lax.broadcasted_iota(jnp.int32, (rows, rows // r), 1)
    return product((token // r == group).astype(jnp.bfloat16), x, narrow=narrow)


def _spread_columns(x, width: int, first: int, channels: int, narrow: bool) -> jax.Array:
    """Column (first + c) // channels of x for each channel c of a run: [rows, width]."""
    columns = x.shape[1]
    column = lax.broadcasted_iota(jnp.int32, (columns, width), 0)
    channel = lax.broadcasted_iota(jnp.int32, (columns, width), 1) + first
    return product(x, (channel // channels == column).astype(jnp.bfloat16), narrow=narrow)


def _words(part: jax.Array) -> jax.Array:
    """float16 as i16 words: Mosaic has no float16."""
    return lax.bitcast_convert_type(part, jnp.int16) if part.dtype == jnp.float16 else part


def _as_numbers(x: jax.Array, dtype: str) -> jax.Array:
    """A fetched tile as numbers: payload of codes as i32, of floats as such, float16 as f32."""
    if dtype == "float16":
        return float16_to_float32(x.astype(jnp.int32))
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32)
    return x if x.dtype == jnp.bfloat16 else x.astype(jnp.float32)


def float16_to_float32(words: jax.Array) -> jax.Array:
    """Decode the bits of float16, i32, with integer and f32 arithmetic; exact for all of them."""
    magnitude = words & 0x7FFF
    # The 15 bits as an f32's exponent and mantissa are 2^-112 times the number, subnormals too
    # where the hardware keeps them; it does not, so those (below 2^-14) are built by counting.
    normal = lax.bitcast_convert_type((magnitude << 13) + jnp.int32(112 << 23), jnp.float32)
    small = magnitude.astype(jnp.float32) * jnp.float32(2.0**-24)
    special = lax.bitcast_convert_type((magnitude << 13) | jnp.int32(0x7F800000), jnp.float32)
    value = jnp.where(magnitude < 0x400, small, jnp.where(magnitude < 0x7C00, normal, special))
    return jnp.where((words & 0x8000) != 0, -value, value)


def split_runs(rows: jax.Array, operand: Operand) -> jax.Array:
    """Channels of each run side by side: [B, K, rows, H] to [B, K, runs, rows, W]."""
    B, K, n, H = rows.shape
    R, W = operand.format.runs, operand.payload_width
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, 0), (0, R * W - H)))
    return rows.reshape(B, K, n, R, W).transpose(0, 1, 3, 2, 4)


def join_runs(rows: jax.Array, width: int) -> jax.Array:
    """Undo `split_runs`: [B, K, runs, rows, W] to [B, K, rows, width]."""
    B, K, R, n, W = rows.shape
    return rows.transpose(0, 1, 3, 2, 4).reshape(B, K, n, R * W)[..., :width]


ROTATION_INPUTS = 3


def rotation_inputs(rotation, key: Operand) -> tuple[jax.Array, ...]:
    """What turning keys takes: base i32[B], frequencies, and the signed swap of pairs.

    A channel is the pair (i, i + half) of the first 2 * half; the rest has frequency 0 and no
    partner. Both are cut into runs: f32[runs, 1, W] and f32[runs, runs, W, W].
    """
    R, W = key.format.runs, key.payload_width
    half = rotation.inverse_frequencies.shape[0]
    frequencies = jnp.concatenate([rotation.inverse_frequencies] * 2)
    frequencies = jnp.pad(frequencies, (0, R * W - 2 * half)).reshape(R, 1, W)
    h = jnp.arange(R * W, dtype=jnp.int32)
    source, target = h[:, None], h[None]
    low = (target < half) & (source == target + half)  # low channels get minus the high ones
    high = (target >= half) & (target < 2 * half) & (source == target - half)
    swap = high.astype(jnp.float32) - low.astype(jnp.float32)
    swap = swap.reshape(R, W, R, W).transpose(0, 2, 1, 3)
    if key.transposed:
        frequencies = frequencies.swapaxes(1, 2)
    return rotation.base, frequencies, swap


def rotation_specs(inputs) -> list[pl.BlockSpec]:
    """Specs of `rotation_inputs`: the base in SMEM, the others whole."""
    if not inputs:
        return []
    _, *whole = inputs
    specs = [pl.BlockSpec(x.shape, lambda *_, n=x.ndim: (0,) * n) for x in whole]
    return [pl.BlockSpec(memory_space=pltpu.SMEM), *specs]


def rotate(tiles: list[jax.Array], rotation, positions: jax.Array, b, transposed: bool):
    """Turn decoded keys by their positions i32[1, block]."""
    base, frequencies, swap = rotation
    distance = (positions - base[b]).astype(jnp.float32)
    tiles = [tile.astype(jnp.float32) for tile in tiles]
    turned = []
    for r, tile in enumerate(tiles):
        if transposed:
            angle = frequencies[r] * distance
            partners = [_contract_first(swap[s, r], x) for s, x in enumerate(tiles)]
        else:
            column = jnp.broadcast_to(distance, (frequencies.shape[2], distance.shape[1])).T
            angle = column * frequencies[r]
            partners = [product(x, swap[s, r], narrow=False) for s, x in enumerate(tiles)]
        turned.append(tile * jnp.cos(angle) + sum(partners) * jnp.sin(angle))
    return turned


def _contract_first(a: jax.Array, b: jax.Array) -> jax.Array:
    """Product of a [c, m] transposed with b [c, n]."""
    return lax.dot_general(a, b, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
