"""Pages: logical token order and physical place are apart; a page table maps one to the other.

A part is [P, K, Z/r, W]: one page is one contiguous block for all its heads. Each sequence owns M
pages from the start, handed out in shuffled order so that nothing can rely on their order.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.base import Place, check_at_least
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.words import from_words, storage_dtype, to_storage
from pallas_kernels.append import append

SHUFFLE_SEED = 0x9A6E


@dataclasses.dataclass(frozen=True, kw_only=True)
class Paged:
    """Slots live in pages of `page_size` tokens, anywhere in the pool.

    Attributes:
        page_size: Z, tokens per page.

    >>> Paged(page_size=16).slot_multiple
    16
    """

    page_size: int = 16

    def __post_init__(self) -> None:
        check_at_least(self, page_size=1)

    @property
    def slot_multiple(self) -> int:
        return self.page_size

    def allocate(self, place: Place) -> jax.Array:
        P = place.batch * place.num_slots // self.page_size
        rows = self.page_size // place.part.tokens_per_row
        shape = (P, place.heads, rows, place.part.width)
        return jnp.zeros(shape, storage_dtype(place.part.dtype))

    def tables(self, batch: int, num_slots: int) -> tuple[jax.Array, ...]:
        M = num_slots // self.page_size
        pages = np.random.default_rng(SHUFFLE_SEED).permutation(batch * M)
        return (jnp.asarray(pages.reshape(batch, M), jnp.int32),)

    def read(self, buffer, place: Place, table, start, size: int):
        B, K, W = place.batch, place.heads, place.part.width
        ids = self._page_ids(place, table, start, size)
        pages = jnp.take(buffer, ids, axis=0, mode="clip")  # [B, m, K, Z/r, W]
        pages = from_words(pages, place.part.dtype)
        return pages.transpose(0, 2, 1, 3, 4).reshape(B, K, size, W)

    def write(self, buffer, place: Place, table, start, rows):
        B, K, size, W = rows.shape
        ids = self._page_ids(place, table, start, size)
        _, m = ids.shape
        pages = rows.reshape(B, K, m, size // m, W).transpose(0, 2, 1, 3, 4)
        stored = to_storage(pages, place.part.dtype, buffer.dtype)
        return buffer.at[ids].set(stored, mode="drop", unique_indices=True)

    def scatter(self, buffer, place: Place, table, row, rows):
        stored = to_storage(rows, place.part.dtype, buffer.dtype)
        return append(buffer, stored, row, page_table=table, implementation=place.implementation)

    def reorder(self, buffer, place: Place, table, index):
        source = jnp.take(table, index, axis=0, mode="clip")
        return buffer.at[table].set(buffer[source], unique_indices=True)

    def operand(self, buffers, places, width: int, codec) -> Operand:
        """The stored field as attention kernels see it."""
        return Operand(
            parts=tuple(buffers),
            tokens_per_row=tuple(place.part.tokens_per_row for place in places),
            dtypes=tuple(place.part.dtype for place in places),
            width=width,
            format=codec,
            paged=True,
        )

    def can_transpose(self) -> bool:
        """Pages keep tokens outermost: one page is one block for all kernels."""
        return False

    def window_unit(self, tokens_per_row: int) -> int:
        return self.page_size // tokens_per_row

    @classmethod
    def examples(cls) -> tuple["Paged", ...]:
        return (cls(page_size=4),)

    def _page_ids(self, place: Place, table, start, size: int):
        """Pages of the row window, i32[B, m]; the window starts and ends at page borders."""
        per_page = self.page_size // place.part.tokens_per_row
        m = size // per_page
        first = (start // per_page)[:, None] + jnp.arange(m, dtype=jnp.int32)[None]
        return jnp.take_along_axis(table, first, axis=1, mode="clip")
