"""The one Triton body of all attention kernels.

Grid (B * K, tiles, splits). A program holds one tile of query rows (t, g) of one stored head and
walks its share of the blocks that some row may see (`schedule.py`): flash-decoding. The splits are
merged by log-sum-exp outside.

Slots become addresses one by one, so a contiguous row, a transposed one and a page need no kernel
of their own; codes enter the products run by run (`affine.py`).

Forward only. Bytes moved: the blocks of the list, once for each tile.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels._common import affine, triton
from pallas_kernels._common.affine import Tile
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.schedule import (
    Rows,
    first_positions,
    tile_queries,
    tile_rows,
    untile,
    visible_blocks,
)
from pallas_kernels._common.softmax import merge_splits, mix_around
from pallas_kernels._common.tiles import GpuTiles
from pallas_kernels._common.visibility import Visibility, visible

LOWEST = float(jnp.finfo(jnp.float32).min)


def attention(
    queries: Sequence[jax.Array],  # [B, T, N, H] each
    keys: Sequence[Operand],
    value: Operand | None,
    visibility: Visibility,
    key_positions: jax.Array,  # i32[B, S]
    *,
    page_table,
    scale,
    softcap,
    key_rotation,
    rotated: int,
    tiles: GpuTiles,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """Softmax over the sum of all queries times their keys, times the values.

    Args:
        queries: one for each part of a key.
        keys: the parts of a key, native operands with the same slots and heads.
        value: a native operand; None: the values are the first part of the keys.
        visibility, key_positions, page_table, scale, softcap, key_rotation: as of `attention`.
        rotated: which part of the keys `key_rotation` turns.
        tiles: sizes.
        interpret: run by the interpreter.
        name: of the kernel, in profiles and dumps.

    Returns:
        output f32[B, T, N, Hv] and logsumexp f32[B, T, N].
    """
    B, T, N, _ = queries[0].shape
    K = keys[0].num_kv_heads(B)
    rows = tile_rows(visibility, N // K, tiles.rows)
    tiled = tuple(tile_queries(q, K) for q in queries)
    all_rows = tiled[0].shape[2]
    blocks = visible_blocks(rows, visibility.sinks, key_positions, tiles.block)
    body = functools.partial(
        _kernel,
        keys=[key.shapes() for key in keys],
        value=None if value is None else value.shapes(),
        tiles=tiles,
        sinks=visibility.sinks,
        softcap=softcap,
        rotated=rotated,
        uniform=T == 1,
    )
    width = (value or keys[0]).width
    output, lse = triton.call(
        body,
        dict(
            queries=tiled,
            rows=rows,
            blocks=blocks,
            positions=key_positions,
            firsts=first_positions(key_positions, tiles.block),
            scale=scale.reshape(1),
            keys=tuple(triton.parts_of(key) for key in keys),
            values=() if value is None else triton.parts_of(value),
            table=page_table,
            rotation=key_rotation,
        ),
        (
            jax.ShapeDtypeStruct((tiles.splits, B, K, all_rows, width), jnp.float32),
            jax.ShapeDtypeStruct((tiles.splits, B, K, all_rows), jnp.float32),
        ),
        grid=(B * K, pl.cdiv(all_rows, tiles.rows), tiles.splits),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
        name=name,
    )
    output, lse = merge_splits(output, lse)
    return untile(output, T, N), untile(lse[..., None], T, N)[..., 0]


def _kernel(refs, out_ref, lse_ref, *, keys, value, tiles, sinks, softcap, rotated, uniform):
    K = out_ref.shape[2]
    b, k = pl.program_id(0) // K, pl.program_id(0) % K
    tile, split = pl.program_id(1), pl.program_id(2)
    row = tile * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    real = row < out_ref.shape[3]
    seen_by = Rows(*(x[b, tile, :] for x in refs["rows"]))
    S = refs["positions"].shape[1]
    narrow = refs["queries"][0].dtype != jnp.float32
    scale = refs["scale"][0]
    keys = [triton.Columns(key, K) for key in keys]
    values = keys[0] if value is None else triton.Columns(value, K)
    queries = []
    for q, key in zip(refs["queries"], keys, strict=True):
        channels = [key.channels(n) for n in range(len(key.tiles))]
        queries.append(
            [
                triton.load(q.at[b, k, row[:, None], h[None]], real[:, None] & exist[None])
                for h, exist in channels
            ]
        )

    def key_tile(part, n, place, positions):
        key, parts = keys[part], refs["keys"][part]
        if refs["rotation"] is None or part != rotated:
            return key.load(parts, place, n)
        return Tile(_rotated(key, parts, place, n, positions, refs["rotation"], b))

    def step(i, carry):
        outputs, rests, top, total = carry
        block = refs["blocks"].index[b, tile, i]
        slots = block * tiles.block + jnp.arange(tiles.block, dtype=jnp.int32)
        stored = None if S % tiles.block == 0 else slots < S
        first = refs["firsts"][b, block]
        broken = jnp.broadcast_to(first < 0, slots.shape)  # only such blocks load positions
        wanted = broken if stored is None else broken & stored
        listed = triton.load(refs["positions"].at[b, slots], wanted, -1)
        positions = jnp.where(broken, listed, first + slots - block * tiles.block)
        place = triton.Slots(slots, stored, b, k, refs["table"])
        scores = jnp.zeros((tiles.rows, tiles.block), jnp.float32)
        shared = []  # the first part, where it serves as values too
        for part, tiled in enumerate(queries):
            for n, q in enumerate(tiled):
                keyed = key_tile(part, n, place, positions)
                scores += affine.scores(q, keyed, narrow=narrow, transposed=True, stack=False)
                shared += [keyed] if part == 0 and value is None else []
        scores = scores * scale
        if softcap is not None:
            scores = softcap * triton.tanh(scores / softcap)
        mask = visible(
            positions[None],
            seen_by.first[:, None],
            seen_by.window_start[:, None],
            seen_by.last[:, None],
            sinks,
        )
        scores = jnp.where(mask, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(mask, jnp.exp(scores - new_top[:, None]), 0.0)
        decay = jnp.exp(top - new_top)
        total = total * decay + jnp.sum(weights, axis=1)
        live = jnp.max(mask.astype(jnp.int32), axis=0) > 0
        new_outputs, new_rests = [], []
        for n, (o, rest) in enumerate(zip(outputs, rests, strict=True)):
            v = shared[n] if value is None else values.load(refs["values"], place, n)
            v = affine.keep(v, live)
            mixed = affine.mix(weights, v, narrow=narrow, stack=False)
            new = affine.offsets(weights, v)
            new_rests.append(tuple(r * decay[:, None] + x for r, x in zip(rest, new, strict=True)))
            if not uniform and not v.scales:
                # One query's value may be another's dead slot, and 0 * NaN is NaN.
                broken = jnp.max(jnp.where(jnp.abs(mixed) < jnp.inf, 0, 1)) > 0
                around = functools.partial(mix_around, narrow=narrow)
                mixed = lax.cond(
                    broken, around, lambda *_, mixed=mixed: mixed, weights, v.levels, mask
                )
            o = o * decay[:, None] + mixed
            new_outputs.append(o)
        return tuple(new_outputs), tuple(new_rests), new_top, total

    count = refs["blocks"].count[b, tile]
    share = (count + tiles.splits - 1) // tiles.splits
    groups, n = values.groups, len(values.tiles)
    rest = jnp.zeros((tiles.rows, tiles.block), jnp.float32)
    offsets = groups.count if groups.stacked and len(values.operand.parts) == 3 else 0
    start = (
        (jnp.zeros((tiles.rows, values.column.shape[0]), jnp.float32),) * n,
        ((rest,) * offsets,) * n,
        jnp.full(tiles.rows, LOWEST, jnp.float32),
        jnp.zeros(tiles.rows, jnp.float32),
    )
    first = split * share
    last = jnp.minimum(first + share, count)
    outputs, rests, top, total = lax.fori_loop(first, last, step, start)
    empty = total == 0
    total = jnp.where(empty, 1.0, total)
    for n, (o, rest) in enumerate(zip(outputs, rests, strict=True)):
        h, exist = values.channels(n)
        if rest:
            o = affine.add_offsets(o, rest, groups.masks(n, o.shape[1]))
        at = out_ref.at[split, b, k, row[:, None], h[None]]
        triton.store(at, o / total[:, None], real[:, None] & exist[None])
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    triton.store(lse_ref.at[split, b, k, row], lse, real)


def _rotated(keys, parts, place, n: int, positions, rotation, b):
    """Keys [block, W] of a tile, turned by their positions; the partners are loaded beside."""
    h, exist = keys.channels(n)
    half = rotation.inverse_frequencies.shape[0]
    turned = exist & (h < 2 * half)
    pair = jnp.where(turned, h % half, 0)
    frequencies = triton.load(rotation.inverse_frequencies.at[pair], turned)
    angle = (positions - rotation.base[b]).astype(jnp.float32)[:, None] * frequencies[None]
    partner = jnp.where(turned, jnp.where(h < half, h + half, h - half), h)
    k = keys.values(parts, place, n).astype(jnp.float32)
    other = keys.values_of(parts, place, partner, exist).astype(jnp.float32)
    sine = jnp.sin(angle) * jnp.where(h < half, -1.0, 1.0)[None]
    return jnp.where(turned[None], k * jnp.cos(angle) + other * sine, k)
