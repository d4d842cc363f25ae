"""The narrow door to Pallas' Triton lowering: calls, loads, dots.

JAX 0.11 deprecates that lowering for Mosaic GPU, which has no Ampere on 0.10; whoever replaces it
replaces this file and the kernels' `gpu.py`.
"""

import importlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels._common.affine import Groups, Tile
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.words import from_words, to_words


def _plgpu():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("jax.experimental.pallas.triton")


def call(
    body,
    arguments,
    out_shape,
    *,
    grid,
    num_warps: int,
    num_stages: int,
    interpret,
    name,
    aliases: Mapping[str, int] | None = None,
):
    """Run `body(refs, *out_refs)` over a grid; `arguments` is a pytree of whole arrays.

    Args:
        aliases: {name: output}: the output starts as the array `arguments[name]`, in its memory.
    """
    leaves, tree = jax.tree.flatten(arguments)
    position = {id(leaf): i for i, leaf in enumerate(leaves)}
    in_place = {position[id(arguments[x])]: output for x, output in (aliases or {}).items()}

    def kernel(*refs):
        inputs, outputs = refs[: len(leaves)], refs[len(leaves) :]
        body(jax.tree.unflatten(tree, inputs), *outputs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return pl.pallas_call(
            kernel,
            out_shape=out_shape,
            grid=grid,
            compiler_params=_plgpu().CompilerParams(num_warps=num_warps, num_stages=num_stages),
            input_output_aliases=in_place,
            interpret=interpret,
            name=name,
        )(*leaves)


def load(ref, mask=None, other: int | None = 0):
    """Load elements; where the mask is false, `other` (None: anything), and nothing is fetched."""
    if mask is None:
        return _plgpu().load(ref)
    return _plgpu().load(ref, mask=jnp.broadcast_to(mask, ref.shape), other=other)


def store(ref, x, mask) -> None:
    """Store elements where the mask is true."""
    _plgpu().store(ref, x, mask=jnp.broadcast_to(mask, x.shape))


def tanh(x):
    """Hyperbolic tangent, as 1 - 2 / (exp(2x) + 1), right at both ends: Triton has none."""
    return 1.0 - 2.0 / (jnp.exp(2.0 * x) + 1.0)


class Slots(NamedTuple):
    """Where a block of slots of one sequence and head lies."""

    slots: jax.Array  # i32[block]
    stored: jax.Array | None  # bool[block]: below S; None is all
    b: jax.Array
    k: jax.Array
    table: Any  # ref i32[B, M] or None


# Columns of codes in a tile: more of them, and what they meet, fill the registers.
WIDEST = 128
WIDEST_DECODED = 64  # of rows so wide that they are decoded


class Span(NamedTuple):
    """Columns [first, first + width) of the payload, in the bits of one run."""

    run: int
    first: int
    width: int


class Columns:
    """An operand in register tiles, each a run of channels or, where that is wide, a piece of one.

    Attributes:
        tiles: one a register tile.
        column: i32[n], n a power of two: columns of a tile from its first on; some may not exist.
    """

    def __init__(self, operand: Operand, num_kv_heads: int):
        self.operand, self.num_kv_heads = operand, num_kv_heads
        self.per_column = (1, *operand.format.channels_per_column(operand.width))
        W, R = operand.payload_width, operand.format.runs
        width = W
        if len(operand.parts) > 1:
            width = min(W, WIDEST if operand.width <= 2 * WIDEST else WIDEST_DECODED)
        # Runs of the same columns follow each other: they share the codes that are in registers.
        self.tiles = [
            Span(run, first, min(width, W - first))
            for first in range(0, W, width)
            for run in range(R)
        ]
        self.column = jnp.arange(max(16, pl.next_power_of_2(width)), dtype=jnp.int32)
        self.groups = Groups(operand, [(t.run * W + t.first, t.width) for t in self.tiles])

    def channels(self, tile: int) -> tuple[jax.Array, jax.Array]:
        """Channels i32[n] of a tile, and which of them exist, bool[n]."""
        run, first, width = self.tiles[tile]
        channels = self.column + (run * self.operand.payload_width + first)
        return channels, (self.column < width) & (channels < self.operand.width)

    def load(self, parts, place: Slots, tile: int) -> Tile:
        """A block of one tile: levels where products take the scales, else values."""
        groups = self.groups
        if not groups.stacked:
            return Tile(self.values(parts, place, tile))
        columns = [groups.first(tile) + i for i in range(groups.count)]
        columns = [min(c, groups.columns - 1) for c in columns]
        scales, *zeros = (
            tuple(
                load(self._at(ref, place, place.slots, c), place.stored).astype(jnp.float32)[None]
                for c in columns
            )
            for ref in parts[1:]
        )
        masks = groups.masks(tile, self.column.shape[0])
        return Tile(self._levels(parts[0], place, tile), scales, zeros[0] if zeros else (), masks)

    def values(self, parts, place: Slots, tile: int) -> jax.Array:
        """Decoded values [block, n] of a tile."""
        levels = self._levels(parts[0], place, tile)
        (n,), per_column = self.column.shape, set(self.per_column[1:])
        run, first, _ = self.tiles[tile]
        start = run * self.operand.payload_width + first
        c = max(per_column, default=1)
        whole = c > 1 and c & (c - 1) == 0 and start % c == 0 and n % c == 0
        if not whole or set(self.operand.tokens_per_row) != {1}:
            return self._scaled(levels, parts, place, *self.channels(tile))
        # A scale is loaded once and not for each of its channels: addresses fill registers too.
        column = start // c + jnp.arange(n // c, dtype=jnp.int32)
        for i, ref in enumerate(parts[1:]):
            at = self._at(ref, place, place.slots[:, None], column[None])
            row = load(at, _both(place.stored, column < ref.shape[-1])).astype(jnp.float32)
            row = jnp.broadcast_to(row[:, :, None], (*row.shape, c)).reshape(row.shape[0], n)
            levels = levels.astype(jnp.float32)
            levels = levels * row if i == 0 else levels + row
        return levels

    def values_of(self, parts, place: Slots, channels: jax.Array, exist: jax.Array) -> jax.Array:
        """Decoded values [block, len(channels)] of any channels: element by element, slow."""
        W = self.operand.payload_width
        at = self._at(parts[0], place, place.slots[:, None], (channels % W)[None])
        payload = self._numbers(load(at, _both(place.stored, exist)))
        run = jnp.where(exist, channels // W, 0)[None]
        return self._scaled(self.operand.format.levels(payload, run), parts, place, channels, exist)

    def _levels(self, ref, place: Slots, tile: int) -> jax.Array:
        # Plain columns, and no mask where none is needed: so Triton sees long vector loads.
        run, first, width = self.tiles[tile]
        exist = None if width == self.column.shape[0] else self.column < width
        at = self._at(ref, place, place.slots[:, None], (self.column + first)[None])
        payload = self._numbers(load(at, _both(place.stored, exist)))
        return self.operand.format.levels(payload, run)

    def _numbers(self, payload: jax.Array) -> jax.Array:
        """A loaded payload: codes as i32, float8 from the bytes that it is passed as."""
        dtype = self.operand.dtypes[0]
        if dtype.startswith("float8"):
            return from_words(payload, jnp.dtype(dtype)).astype(jnp.bfloat16)
        integers = jnp.issubdtype(payload.dtype, jnp.integer)
        return payload.astype(jnp.int32) if integers else payload

    def _scaled(self, levels, parts, place: Slots, channels, exist) -> jax.Array:
        others = zip(parts[1:], self.operand.tokens_per_row[1:], self.per_column[1:], strict=True)
        for i, (ref, tokens, per_column) in enumerate(others):
            column = (channels // per_column)[None]
            at = self._at(ref, place, place.slots[:, None], column, tokens)
            row = load(at, _both(place.stored, exist)).astype(jnp.float32)
            levels = levels.astype(jnp.float32)
            levels = levels * row if i == 0 else levels + row
        return levels

    def _at(self, ref, place: Slots, slots, column, tokens_per_row: int = 1):
        """Elements of a part; `slots` and `column` broadcast against each other."""
        operand = self.operand
        if not operand.paged:
            bk = place.b * self.num_kv_heads + place.k
            if operand.transposed:
                return ref.at[bk, column, slots]
            return ref.at[bk, slots // tokens_per_row, column]
        Z, P, M = operand.page_size, ref.shape[0], place.table.shape[1]
        page = place.table.at[place.b, jnp.minimum(slots // Z, M - 1)]
        page = jnp.clip(load(page), 0, P - 1)  # entries of dead pages point anywhere
        return ref.at[page, place.k, (slots % Z) // tokens_per_row, column]


def _both(stored, exist):
    """Mask [block, columns] of slots and columns, either of which may be None for all."""
    if stored is None:
        return None if exist is None else exist[None]
    return stored[:, None] if exist is None else stored[:, None] & exist[None]


def parts_of(operand: Operand) -> tuple[jax.Array, ...]:
    """Arrays as the kernel gets them: float8 as bytes, since Triton has no constant of it."""
    return tuple(to_words(x) if x.dtype.itemsize == 1 else x for x in operand.parts)
