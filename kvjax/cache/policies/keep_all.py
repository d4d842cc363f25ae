"""Keep every token: slot == position."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.cache.policies.window import Window
from kvjax.dims import round_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeepAll:
    """Every token stays; a sequence ends when the cache is full.

    >>> KeepAll().num_slots(100, slack=0, group=32)
    128
    """

    sinks = 0
    linear = True

    def within(self, window: int) -> Window:
        return Window(window=window)

    def num_slots(self, max_len: int, slack: int, group: int) -> int:
        return round_up(max_len, group)

    def capacity(self, max_len: int) -> int | None:
        return max_len

    def window_start(self, positions: jax.Array) -> jax.Array:
        return jnp.zeros_like(positions)

    def slots(self, positions: jax.Array, num_slots: int) -> jax.Array:
        return positions

    def slot_positions(self, lengths: jax.Array, num_slots: int) -> jax.Array:
        s = jnp.arange(num_slots, dtype=jnp.int32)[None]
        return jnp.where(s < lengths[:, None], s, -1)

    def shift(self, positions: jax.Array) -> jax.Array:
        return jnp.zeros_like(positions)

    @classmethod
    def examples(cls) -> tuple["KeepAll", ...]:
        return (cls(),)
