"""Bytes that a kernel's loads fetch, counted from its work list: next to the bytes that it needs.

Decode is bound by memory, so the ratio moved / live is the first thing to know of a kernel: 1 is
what no kernel beats, and whatever is above it (a last block that is half empty, positions, results
of splits) is named part by part.
"""

import dataclasses
import math

import jax
import numpy as np

from pallas_kernels._common.operand import Operand
from pallas_kernels._common.schedule import first_positions, tile_rows, visible_blocks
from pallas_kernels._common.visibility import Visibility

F32 = I32 = 4


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a call moves between memory and kernel, in bytes.

    Attributes:
        parts: keys, values, positions, ... each with its bytes.
        live: bytes of keys and values that some query sees: the least that has to be read.

    >>> Traffic(parts={"keys": 60, "values": 45}, live=100).ratio
    1.05
    """

    parts: dict[str, int]
    live: int

    @property
    def moved(self) -> int:
        """All bytes that are loaded and stored."""
        return sum(self.parts.values())

    @property
    def ratio(self) -> float:
        """Bytes moved over live bytes; infinite if nothing is live."""
        return self.moved / self.live if self.live else math.inf


def attention_traffic(
    query,  # [B, T, N, H]
    key: Operand,
    value: Operand,
    visibility: Visibility,
    key_positions: jax.Array,  # i32[B, S]
    *,
    rows: int,
    block: int,
    heads: int = 1,
    splits: int = 1,
    padded: bool = True,
) -> Traffic:
    """Count the bytes of one call of an attention kernel over a list of visible blocks.

    The kernel walks, for each of B sequences, K / heads groups of stored heads and tiles of `rows`
    query rows, the blocks that some row sees; `splits` programs share a list. Every array is
    counted once for each step that loads it: what a step uses twice is still in its registers, and
    nothing is said of the L2 cache, which can only make it less. The merge of splits, outside of
    the kernel, reads `outputs` again and is not counted.

    Args:
        query: array or ShapeDtypeStruct.
        key, value: operands of arrays or ShapeDtypeStructs; their parts as the device holds them.
        visibility: concrete.
        key_positions: concrete.
        rows, block: sizes of a step.
        heads: stored heads that share a step.
        splits: programs that share a list of blocks; each holds the queries and leaves a result.
        padded: rows that fill up a tile are read and written too, and positions one by one (TPU).
    """
    B, T, N, H = query.shape
    _, S = key_positions.shape
    K = key.num_kv_heads(B)
    seen_by = tile_rows(visibility, N // K, rows)
    blocks = visible_blocks(seen_by, visibility.sinks, key_positions, block)
    index, count = np.asarray(blocks.index), np.asarray(blocks.count)
    _, tiles, num_blocks = index.shape
    listed = np.arange(num_blocks) < count[..., None]
    slots = np.minimum(block, S - index * block)[listed]  # of each step of one head group
    groups = K // heads
    programs = B * groups * tiles * splits
    all_rows = programs * rows if padded else B * groups * splits * T * N // K
    positions = int(slots.sum())
    if not padded:  # the GPU body loads those of broken blocks, and one number of each
        firsts = np.asarray(first_positions(key_positions, block))
        broken = np.take_along_axis(firsts[:, None], index, axis=2)[listed] < 0
        positions = int(slots[broken].sum()) + slots.size
    parts = {
        "keys": K * _stored_bytes(key, slots),
        "values": K * _stored_bytes(value, slots),
        "positions": groups * I32 * positions,
        "page_table": 0,
        "block_list": groups * I32 * slots.size + programs * I32,
        "queries": all_rows * (heads * H * np.dtype(query.dtype).itemsize + 3 * I32),
        "outputs": all_rows * heads * (value.width + 1) * F32,
    }
    if key.paged:
        parts["page_table"] = groups * I32 * int((-(-slots // key.page_size)).sum())
    live_slots = np.asarray(visibility.mask(key_positions).any(1).sum(1))
    live = K * (_stored_bytes(key, live_slots) + _stored_bytes(value, live_slots))
    return Traffic(parts=parts, live=live)


def _stored_bytes(operand: Operand, slots: np.ndarray) -> int:
    """Bytes of one stored head for runs of `slots` each; a row that is touched counts whole."""
    total = 0
    for part, r in zip(operand.parts, operand.tokens_per_row, strict=True):
        columns = part.shape[1 if operand.transposed else -1]
        rows = int((-(-slots // r)).sum())
        total += rows * columns * np.dtype(part.dtype).itemsize
    return total
