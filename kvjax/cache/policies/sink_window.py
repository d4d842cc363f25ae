"""Attention sinks and a rolling window (StreamingLLM, arXiv 2309.17453)."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.base import check_at_least
from kvjax.cache.policies.window import Window, ring_positions
from kvjax.dims import round_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class SinkWindow:
    """The first `sinks` tokens stay for ever beside a window of the newest `window` tokens.

    With slot positions a key stands for its rank among the tokens that the query sees, so a stream
    of any length stays within sinks + window positions.

    Attributes:
        sinks: first tokens that stay.
        window: newest tokens that a query sees, itself among them.

    >>> SinkWindow(sinks=4, window=12).num_slots(100, slack=0, group=1)
    16
    """

    sinks: int = 4
    window: int

    linear = False

    def __post_init__(self) -> None:
        check_at_least(self, sinks=1, window=1)

    def within(self, window: int) -> "SinkWindow | Window":
        return Window(window=window) if window <= self.window else self

    def num_slots(self, max_len: int, slack: int, group: int) -> int:
        wraps = self.capacity(max_len) is None
        ring = self.window + slack if wraps else max(max_len - self.sinks, 1)
        return self.sinks + round_up(ring, group)

    def capacity(self, max_len: int) -> int | None:
        return None if max_len >= self.sinks + self.window else max_len

    def window_start(self, positions: jax.Array) -> jax.Array:
        return positions - (self.window - 1)

    def slots(self, positions: jax.Array, num_slots: int) -> jax.Array:
        ring = num_slots - self.sinks
        in_ring = self.sinks + (positions - self.sinks) % ring
        return jnp.where(positions < self.sinks, positions, in_ring)

    def slot_positions(self, lengths: jax.Array, num_slots: int) -> jax.Array:
        s = jnp.arange(self.sinks, dtype=jnp.int32)[None]
        kept = jnp.where(s < lengths[:, None], s, -1)
        ring = ring_positions(lengths - self.sinks, num_slots - self.sinks)
        return jnp.concatenate([kept, jnp.where(ring >= 0, ring + self.sinks, -1)], axis=1)

    def shift(self, positions: jax.Array) -> jax.Array:
        return jnp.maximum(positions + 1 - self.sinks - self.window, 0)

    @classmethod
    def examples(cls) -> tuple["SinkWindow", ...]:
        return (cls(sinks=4, window=7),)
