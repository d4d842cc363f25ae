"""Stored keys or values as a kernel sees them: parts in memory, and how to decode a block."""

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._common.words import from_words


class BlockFormat(Protocol):
    """What a kernel needs of a codec; must be hashable.

    XLA decodes blocks as a whole. The Pallas kernels see an element as

        value = level(code) * scale + zero

    with code in column h % W of the first part, the payload, of W columns, and scale and zero, the
    second and third part where there are any, in column h // c, c being the part's entry of
    `channels_per_column`. Channels with the same h // W are a *run*: they lie side by side in the
    payload, and their codes in the same bits of it.
    """

    @property
    def runs(self) -> int:
        """Codes in one element of the payload: channels h, h + W, h + 2W, ..."""
        ...

    def channels_per_column(self, width: int) -> tuple[int, ...]:
        """Channels that share one column of each part after the payload."""
        ...

    def decode(self, parts: tuple[jax.Array, ...], width: int) -> jax.Array:
        """Decode rows [..., S // r, W] of each part to values [..., S, width]."""
        ...

    def levels(self, payload: jax.Array, run) -> jax.Array:
        """Numbers that the codes of one run stand for.

        Elementwise jnp only: it runs in registers of TPU and GPU kernels.

        Args:
            payload: [S, n]; integers are i32.
            run: a number, or i32[1, n] where columns differ.

        Returns:
            [S, n], bf16 where that holds all levels exactly, else f32.
        """
        ...


@dataclasses.dataclass(frozen=True)
class AsItIs:
    """The format of values that need no decoding."""

    runs = 1

    def channels_per_column(self, width: int) -> tuple[int, ...]:
        """There is no part but the payload."""
        return ()

    def levels(self, payload: jax.Array, run) -> jax.Array:
        """Return the values as they are."""
        return payload

    def decode(self, parts: tuple[jax.Array, ...], width: int) -> jax.Array:
        """Return the only part."""
        return parts[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Operand:
    """Encoded keys or values of all sequences, as they lie in memory.

    Contiguous: each part is [B*K, S // r, W], or [B*K, W, S] if transposed (r = 1 then).
    Paged (`paged` is true): each part is [P, K, Z // r, W].
    r is the number of tokens that one row of the part describes (a scale may serve a group).
    A part of a narrow float dtype may be stored as integer words (`words.py`).
    """

    parts: tuple[jax.Array, ...]
    tokens_per_row: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    dtypes: tuple[str, ...] = dataclasses.field(metadata=dict(static=True))
    width: int = dataclasses.field(metadata=dict(static=True))
    format: Any = dataclasses.field(metadata=dict(static=True))  # a BlockFormat
    transposed: bool = dataclasses.field(default=False, metadata=dict(static=True))
    paged: bool = dataclasses.field(default=False, metadata=dict(static=True))

    @classmethod
    def raw(cls, values: jax.Array) -> "Operand":
        """Plain values [B*K, S, width]."""
        return cls(
            parts=(values,),
            tokens_per_row=(1,),
            dtypes=(values.dtype.name,),
            width=values.shape[-1],
            format=AsItIs(),
        )

    def native(self) -> "Operand":
        """The same operand with narrow floats as such and not as words: what accelerators hold."""
        parts = (from_words(x, d) for x, d in zip(self.parts, self.dtypes, strict=True))
        return dataclasses.replace(self, parts=tuple(parts))

    def shapes(self) -> "Operand":
        """The same operand with shapes and dtypes in place of arrays."""
        parts = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.parts)
        return dataclasses.replace(self, parts=tuple(parts))

    @property
    def payload_width(self) -> int:
        """W, columns of the payload."""
        return self.parts[0].shape[1 if self.transposed else -1]

    @property
    def bytes_per_slot(self) -> float:
        """Bytes that one head stores for a slot."""
        axis = 1 if self.transposed else -1
        return sum(
            part.shape[axis] * part.dtype.itemsize / r
            for part, r in zip(self.parts, self.tokens_per_row, strict=True)
        )

    @property
    def page_size(self) -> int:
        """Z, tokens per page."""
        return self.parts[0].shape[2] * self.tokens_per_row[0]

    @property
    def unit(self) -> int:
        """Slots that can only be loaded together: a group that shares a row, or a page."""
        rows = math.lcm(*self.tokens_per_row)
        return math.lcm(rows, self.page_size) if self.paged else rows

    def num_slots(self, page_table: jax.Array | None) -> int:
        """S, slots of one sequence."""
        if self.paged:
            assert page_table is not None
            _, M = page_table.shape
            return M * self.page_size
        axis = 2 if self.transposed else 1
        return self.parts[0].shape[axis] * self.tokens_per_row[0]

    def num_kv_heads(self, batch: int) -> int:
        """K, heads that are stored."""
        return self.parts[0].shape[1] if self.paged else self.parts[0].shape[0] // batch

    def load(self, start, size: int, page_table: jax.Array | None) -> jax.Array:
        """Decode slots [start, start + size) of every sequence.

        Args:
            start: first slot, a multiple of `unit`.
            size: number of slots, likewise.
            page_table: i32[B, M] if paged; entries outside the pool read some page, whose slots
                must be invisible.

        Returns:
            [B*K, size, width], or [B*K, width, size] if transposed.
        """
        if self.paged:
            return self._load_pages(start, size, page_table)
        axis = 2 if self.transposed else 1
        rows = tuple(
            from_words(_slice(part, start // r, size // r, axis), dtype)
            for part, r, dtype in zip(self.parts, self.tokens_per_row, self.dtypes, strict=True)
        )
        if self.transposed:  # only parts that need no decoding are stored transposed
            return rows[0]
        return self.format.decode(rows, self.width)

    def _load_pages(self, start, size: int, page_table) -> jax.Array:
        Z = self.page_size
        ids = _slice(page_table, start // Z, size // Z, 1)  # [B, m]
        rows = tuple(
            from_words(jnp.take(part, ids, axis=0, mode="clip"), dtype)
            for part, dtype in zip(self.parts, self.dtypes, strict=True)
        )
        values = self.format.decode(rows, self.width)  # [B, m, K, Z, W]
        B, m, K, _, W = values.shape
        return values.transpose(0, 2, 1, 3, 4).reshape(B * K, m * Z, W)


def _slice(array: jax.Array, start, size: int, axis: int) -> jax.Array:
    """Slice statically where the start is a Python int, so that a whole array costs nothing."""
    if type(start) is int:
        return lax.slice_in_dim(array, start, start + size, axis=axis)
    return lax.dynamic_slice_in_dim(array, start, size, axis=axis)
