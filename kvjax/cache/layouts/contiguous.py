"""One run of slots a sequence and head.

Physically a part is [B*K, S/r, W]: B and K merged, updated and read in that shape with no reshape
between, or XLA:CPU copies the whole buffer in every step. Raw f32 keys are [B*K, W, S], which its
dot reads fastest (docs/decisions.md).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.base import Place
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.words import from_words, storage_dtype, to_storage
from pallas_kernels.append import append


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contiguous:
    """Slots of a sequence lie side by side.

    >>> Contiguous().slot_multiple
    1
    """

    @property
    def slot_multiple(self) -> int:
        return 1

    def allocate(self, place: Place) -> jax.Array:
        BK, rows, W = place.batch * place.heads, place.num_rows, place.part.width
        shape = (BK, W, rows) if place.transposed else (BK, rows, W)
        return jnp.zeros(shape, storage_dtype(place.part.dtype))

    def tables(self, batch: int, num_slots: int) -> tuple[jax.Array, ...]:
        return ()

    def read(self, buffer, place: Place, table, start, size: int):
        B, K, W = place.batch, place.heads, place.part.width
        at = jnp.repeat(start, K)
        axis = 1 if place.transposed else 0
        rows = jax.vmap(lambda x, i: lax.dynamic_slice_in_dim(x, i, size, axis))(buffer, at)
        rows = rows.swapaxes(1, 2) if place.transposed else rows
        return from_words(rows, place.part.dtype).reshape(B, K, size, W)

    def write(self, buffer, place: Place, table, start, rows):
        return self.scatter(buffer, place, table, start, rows)

    def scatter(self, buffer, place: Place, table, row, rows):
        stored = to_storage(rows, place.part.dtype, buffer.dtype)
        return append(
            buffer,
            stored,
            row,
            transposed=place.transposed,
            implementation=place.implementation,
        )

    def reorder(self, buffer, place: Place, table, index):
        K = place.heads
        rows = index[:, None] * K + jnp.arange(K, dtype=jnp.int32)[None]
        return jnp.take(buffer, rows.reshape(-1), axis=0, mode="clip")

    def operand(self, buffers, places, width: int, codec) -> Operand:
        """The stored field as attention kernels see it."""
        return Operand(
            parts=tuple(buffers),
            tokens_per_row=tuple(place.part.tokens_per_row for place in places),
            dtypes=tuple(place.part.dtype for place in places),
            width=width,
            format=codec,
            transposed=places[0].transposed,
        )

    def can_transpose(self) -> bool:
        """Whether raw f32 keys may be stored [W, S]."""
        return True

    def window_unit(self, tokens_per_row: int) -> int:
        return 1

    @classmethod
    def examples(cls) -> tuple["Contiguous", ...]:
        return (cls(),)
