"""A sliding window: a rule about distance; the ring is only where the bytes live."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.base import check_at_least
from kvjax.dims import round_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A query at p sees j iff p - window < j <= p: the window counts the query's own token.

    Attributes:
        window: tokens that a query sees, itself among them.

    >>> Window(window=4).num_slots(100, slack=1, group=1)
    5
    """

    window: int

    sinks = 0
    linear = False

    def __post_init__(self) -> None:
        check_at_least(self, window=1)

    def within(self, window: int) -> "Window":
        return Window(window=min(window, self.window))

    def num_slots(self, max_len: int, slack: int, group: int) -> int:
        # A window longer than the text never wraps: it needs no more slots than tokens.
        wraps = self.capacity(max_len) is None
        return round_up(self.window + slack if wraps else max_len, group)

    def capacity(self, max_len: int) -> int | None:
        return None if max_len >= self.window else max_len

    def window_start(self, positions: jax.Array) -> jax.Array:
        return positions - (self.window - 1)

    def slots(self, positions: jax.Array, num_slots: int) -> jax.Array:
        return positions % num_slots

    def slot_positions(self, lengths: jax.Array, num_slots: int) -> jax.Array:
        return ring_positions(lengths, num_slots)

    def shift(self, positions: jax.Array) -> jax.Array:
        return jnp.maximum(positions + 1 - self.window, 0)

    @classmethod
    def examples(cls) -> tuple["Window", ...]:
        return (cls(window=8), cls(window=64))


def ring_positions(lengths: jax.Array, size: int) -> jax.Array:
    """Newest position below `lengths` i32[B] in each slot of a ring, i32[B, size]; -1 is empty.

    >>> ring_positions(jnp.array([3, 6], jnp.int32), 4).tolist()
    [[0, 1, 2, -1], [4, 5, 2, 3]]
    """
    s = jnp.arange(size, dtype=jnp.int32)[None]
    newest = lengths[:, None] - 1
    position = newest - (newest - s) % size
    return jnp.where((newest >= 0) & (position >= 0), position, -1)
