"""Products with codes that are decoded as level * scale + zero, without decoding them.

Where scale and zero belong to a token and a group of channels, the levels themselves (small
integers, exact in bf16) are multiplied, and the scale joins the scores or the weights:

    q . k_s        = sum_g scale[g, s] (q_g . level_s) + zero[g, s] sum(q_g)
    sum_s w_s v_s  = for the channels of g: (w * scale[g]) . level + sum_s w_s zero[g, s]

with q_g the query on the channels of group g and 0 elsewhere. A TPU stacks the groups as more rows
of one product: decode has fewer rows than its matrix unit loads a tile for. A GPU multiplies group
by group: the rows of one matrix instruction are few, and nothing has to cross lanes. Where a row
has many groups, as a wide latent does, that is more work than decoding: then tiles hold values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._common.operand import Operand
from pallas_kernels._common.products import product

MOST_GROUPS = 8  # of a whole row: where there are more, tiles hold values


class Tile(NamedTuple):
    """A block of slots of one run of an operand, or of a piece of one.

    Attributes:
        levels: [S, W], or [W, S] if transposed: numbers, or the values where there is no scale.
        scales: f32[1, S] of each of the tile's groups.
        zeros: f32[1, S] of each, or nothing.
        groups: bool[1, W], the channels of each; None is all.
    """

    levels: jax.Array
    scales: tuple[jax.Array, ...] = ()
    zeros: tuple[jax.Array, ...] = ()
    groups: tuple[jax.Array | None, ...] = ()


class Groups:
    """Which groups of channels the tiles of an operand meet: at most `count` each.

    A tile holds the channels of a span, its first one and how many.
    """

    def __init__(self, operand: Operand, spans: Sequence[tuple[int, int]]):
        channels = operand.format.channels_per_column(operand.width)
        self.stacked = bool(channels) and set(operand.tokens_per_row) == {1}
        if not self.stacked:
            return
        self.columns = operand.parts[1].shape[-1]
        self.stacked = self.columns <= MOST_GROUPS
        (self.channels,) = set(channels)
        self.spans = spans
        lasts = [min(first + width, operand.width) - 1 for first, width in spans]
        self.count = max(x // self.channels - self.first(i) + 1 for i, x in enumerate(lasts))

    def first(self, tile: int) -> int:
        """First group of a tile."""
        return self.spans[tile][0] // self.channels

    def masks(self, tile: int, padded: int) -> tuple[jax.Array | None, ...]:
        """Channels of each group, bool[1, padded]; `padded` may be more than the tile's own."""
        if self.count == 1:
            return (None,)
        first, width = self.spans[tile]
        column = lax.broadcasted_iota(jnp.int32, (1, padded), 1)
        group = (column + first) // self.channels
        inside = column < width
        return tuple(inside & (group == self.first(tile) + i) for i in range(self.count))


def keep(tile: Tile, live: jax.Array) -> Tile:
    """The tile with all slots that are not live, bool[S], as zeros: they may hold anything."""
    if not tile.scales:
        zero = jnp.zeros((), tile.levels.dtype)
        return tile._replace(levels=jnp.where(live[:, None], tile.levels, zero))
    scales, zeros = (
        tuple(jnp.where(live[None], x, 0.0) for x in rows) for rows in (tile.scales, tile.zeros)
    )
    return tile._replace(scales=scales, zeros=zeros)


def scores(
    query: jax.Array, tile: Tile, *, narrow: bool, transposed: bool, stack: bool
) -> jax.Array:
    """Query f32 or bf16 [rows, W] times the tile's tokens: f32[rows, S]."""
    if not tile.scales:
        return product(query, tile.levels, narrow=narrow, transposed=transposed)
    parts = [_only(group, query) for group in tile.groups]
    dots = _products(parts, tile.levels, narrow=narrow, transposed=transposed, stack=stack)
    total = _sum(dot * scale for dot, scale in zip(dots, tile.scales, strict=True))
    if tile.zeros:
        sums = [jnp.sum(part.astype(jnp.float32), axis=1, keepdims=True) for part in parts]
        total += _sum(x * zero for x, zero in zip(sums, tile.zeros, strict=True))
    return total


def mix(weights: jax.Array, tile: Tile, *, narrow: bool, stack: bool) -> jax.Array:
    """Weights f32[rows, S] times the tile's values but for zero points: f32[rows, W]."""
    if not tile.scales:
        return product(weights, tile.levels, narrow=narrow)
    scaled = [weights * scale for scale in tile.scales]
    mixed = _products(scaled, tile.levels, narrow=narrow, transposed=False, stack=stack)
    return _sum(_only(group, x) for group, x in zip(tile.groups, mixed, strict=True))


def offsets(weights: jax.Array, tile: Tile) -> tuple[jax.Array, ...]:
    """Weights times zero points, f32[rows, S] for each group: what `mix` leaves out."""
    return tuple(weights * zero for zero in tile.zeros)


def add_offsets(output: jax.Array, totals, groups) -> jax.Array:
    """Add to f32[rows, W] the offsets f32[rows, S] of each group, summed over all slots."""
    for total, group in zip(totals, groups, strict=True):
        offset = jnp.broadcast_to(jnp.sum(total, axis=1, keepdims=True), output.shape)
        output += _only(group, offset)
    return output


def _only(group: jax.Array | None, x: jax.Array) -> jax.Array:
    """The channels of the group, zeros elsewhere."""
    return x if group is None else jnp.where(group, x, jnp.zeros((), x.dtype))


def _products(parts, levels, *, narrow: bool, transposed: bool, stack: bool) -> list[jax.Array]:
    """Each part [rows, c] times the levels."""
    if not stack or len(parts) == 1:
        return [product(part, levels, narrow=narrow, transposed=transposed) for part in parts]
    rows = parts[0].shape[0]
    whole = product(jnp.concatenate(parts), levels, narrow=narrow, transposed=transposed)
    return [whole[i * rows : (i + 1) * rows] for i in range(len(parts))]


def _sum(terms):
    first, *others = terms
    return sum(others, first)
