"""The one Mosaic body of all attention kernels.

Grid (B, head groups, tiles, blocks). A step holds one tile of query rows (t, g) of several stored
heads and one block of slots. The list of blocks that some row may see is prefetched to SMEM and the
block maps follow it, so the pipeline fetches those blocks and no other, two at a time (double
buffered); the last axis is as long as the longest list. A block of a paged store is several pages,
each fetched on its own through the prefetched page table.

Codes enter the products run by run (`affine.py`).

Forward only. Bytes moved: the blocks of the list, once for each tile.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels._common import affine, mosaic
from pallas_kernels._common.affine import Tile
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.schedule import (
    Rows,
    tile_queries,
    tile_rows,
    untile,
    visible_blocks,
)
from pallas_kernels._common.softmax import mix_around
from pallas_kernels._common.tiles import TpuTiles
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
    tiles: TpuTiles,
    interpret,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """See `flash_gpu.attention`, whose arguments these are; `interpret` may be InterpretParams."""
    B, T, N, _ = queries[0].shape
    _, S = key_positions.shape
    K = keys[0].num_kv_heads(B)
    if queries[0].dtype == jnp.float16:  # Mosaic has none
        queries = [q.astype(jnp.float32) for q in queries]
    narrow = queries[0].dtype != jnp.float32
    rows = tile_rows(visibility, N // K, tiles.rows)
    blocks = visible_blocks(rows, visibility.sinks, key_positions, tiles.block)
    _, num_tiles, num_blocks = blocks.index.shape

    def fetcher(operand: Operand):
        return mosaic.Fetcher(operand, B, K, tiles.heads, tiles.block, narrow)

    fetchers = [fetcher(key) for key in keys]
    values = fetchers[0] if value is None else fetcher(value)
    fetched = fetchers if value is None else [*fetchers, values]
    tiled = [  # [B, K, runs, rows, W]
        mosaic.split_runs(tile_queries(q, K, tiles.rows), key)
        for q, key in zip(queries, keys, strict=True)
    ]
    padding = num_blocks * tiles.block - S
    held = jnp.pad(key_positions, ((0, 0), (0, padding)), constant_values=-1)
    held = held.reshape(B, num_blocks, 1, tiles.block)
    index = jnp.where(  # past the end of a list its last block again: nothing new is fetched
        jnp.arange(num_blocks, dtype=jnp.int32)[None, None] < blocks.count[..., None],
        blocks.index,
        jnp.take_along_axis(blocks.index, jnp.maximum(blocks.count - 1, 0)[..., None], axis=2),
    )
    table = () if page_table is None else (values.pad_table(page_table, num_blocks),)
    prefetched = (index, blocks.count, *table)

    def at_tile(*shape):  # [B, tiles, ...]
        return pl.BlockSpec((1, 1, *shape), lambda b, h, t, i, *_: (b, t, *(0 for _ in shape)))

    def at_heads(*shape):  # [B, K, runs, rows of all tiles, ...]
        return pl.BlockSpec(
            (1, tiles.heads, *shape), lambda b, h, t, i, *_: (b, h, 0, t, *(0 for _ in shape[2:]))
        )

    per_row = [x[..., None] for x in rows]
    rotation = ()
    if key_rotation is not None:
        rotation = mosaic.rotation_inputs(key_rotation, keys[rotated])
    in_specs = [
        pl.BlockSpec(memory_space=pltpu.SMEM),
        *(at_heads(q.shape[2], tiles.rows, q.shape[4]) for q in tiled),
        *(at_tile(tiles.rows, 1) for _ in per_row),
        pl.BlockSpec(
            (1, 1, 1, tiles.block), lambda b, h, t, i, index, *_: (b, index[b, t, i], 0, 0)
        ),
        *mosaic.rotation_specs(rotation),
        *(spec for x in fetched for spec in x.specs()),
    ]
    body = functools.partial(
        _kernel,
        keys=fetchers,
        values=None if value is None else values,
        rotated=rotated if rotation else None,
        paged=bool(table),
        sinks=visibility.sinks,
        softcap=softcap,
        narrow=narrow,
    )
    R, W = values.runs, values.width
    all_rows = num_tiles * tiles.rows
    output, lse = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(B, K // tiles.heads, num_tiles, jnp.maximum(blocks.count.max(), 1)),
            in_specs=in_specs,
            out_specs=(at_heads(R, tiles.rows, W), at_heads(1, tiles.rows, 1)),
            scratch_shapes=(
                pltpu.VMEM((tiles.heads, R, tiles.rows, W), jnp.float32),
                pltpu.VMEM((tiles.heads, tiles.rows, 1), jnp.float32),
                pltpu.VMEM((tiles.heads, tiles.rows, 1), jnp.float32),
            ),
        ),
        out_shape=(
            jax.ShapeDtypeStruct((B, K, R, all_rows, W), jnp.float32),
            jax.ShapeDtypeStruct((B, K, 1, all_rows, 1), jnp.float32),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name=name,
    )(
        *prefetched,
        scale.reshape(1),
        *tiled,
        *per_row,
        held,
        *rotation,
        *(part for x in fetched for part in x.arguments()),
    )
    output = mosaic.join_runs(output, values.operand.width)  # [B, K, rows, Hv]
    return untile(output, T, N), untile(lse[:, :, 0], T, N)[..., 0]


def _kernel(*refs, keys, values, rotated, paged, sinks, softcap, narrow):
    refs = list(refs)

    def take(n: int) -> list:
        taken, refs[:] = refs[:n], refs[n:]
        return taken

    counts = take(3 if paged else 2)[1]
    (scale,) = take(1)
    queries = take(len(keys))
    first, window_start, last, held = take(4)
    rotation = take(0 if rotated is None else mosaic.ROTATION_INPUTS)
    key_refs = [take(key.count) for key in keys]
    value_refs = take(0 if values is None else values.count)
    output, lse, mix, top, total = refs
    b, tile, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    heads = mix.shape[0]

    def key_tiles(part, k, positions):
        key, parts = keys[part], key_refs[part]
        if part != rotated:
            return key.load(parts, k)
        whole = key.values(parts, k)
        return [Tile(x) for x in mosaic.rotate(whole, rotation, positions, b, key.transposed)]

    @pl.when(i == 0)
    def _():
        mix[...] = jnp.zeros_like(mix)
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)

    @pl.when(i < counts[b, tile])
    def _():
        positions = held[0, 0]  # [1, block]
        seen_by = Rows(*(x[0, 0] for x in (first, window_start, last)))  # [rows, 1] each
        mask = visible(positions, *seen_by, sinks)

        def one_head(k, _):
            tiles = [key_tiles(part, k, positions) for part in range(len(keys))]
            scores = jnp.zeros(mask.shape, jnp.float32)
            for part, key in enumerate(keys):
                for run, keyed in enumerate(tiles[part]):
                    q = queries[part][0, k, run]
                    scores += affine.scores(
                        q, keyed, narrow=narrow, transposed=not key.transposed, stack=True
                    )
            scores = scores * scale[0]
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            scores = jnp.where(mask, scores, -jnp.inf)
            old_top = top[k]
            new_top = jnp.maximum(old_top, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.where(mask, jnp.exp(scores - new_top), 0.0)
            decay = jnp.exp(old_top - new_top)
            top[k] = new_top
            total[k] = total[k] * decay + jnp.sum(weights, axis=1, keepdims=True)
            shared = tiles[0] if values is None else values.load(value_refs, k)
            for run, v in enumerate(shared):
                mixed = affine.mix(weights, v, narrow=narrow, stack=True)
                if v.zeros:
                    mixed = affine.add_offsets(mixed, affine.offsets(weights, v), v.groups)
                before = mix[k, run] * decay
                mix[k, run] = before + mixed
                if v.scales:
                    continue

                # A dead slot may hold anything, and 0 * NaN is NaN: then it goes round the product.
                broken = jnp.max(jnp.where(jnp.abs(mixed) < jnp.inf, 0.0, 1.0)) > 0

                @pl.when(broken)
                def _(run=run, v=v.levels, before=before):
                    mix[k, run] = before + mix_around(weights, v, mask, narrow)

            return 0

        jax.lax.fori_loop(0, heads, one_head, 0)

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        empty = total[...] == 0
        divisor = jnp.where(empty, 1.0, total[...])
        output[0] = mix[...] / divisor[:, None]
        lse[0, :, 0] = jnp.where(empty, -jnp.inf, top[...] + jnp.log(divisor))
