"""Who sees whom, from positions alone: never from slot indices."""

import dataclasses

import jax
import jax.numpy as jnp


def visible(j, first, window_start, last, sinks: int):
    """Whether a key at position j is seen; arrays broadcast. The one rule of all kernels."""
    inside = (j >= 0) & (j >= first) & (j <= last)
    return inside & ((j >= window_start) | (j < sinks))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
    """The positions that each query sees: an interval, and within it a window and the sinks.

    A key at position j (-1 is an empty slot) is seen iff

        j >= 0  and  first <= j <= last  and  (j >= window_start or j < sinks)

    so a query whose `last` is -1 (padding) sees nothing. Wrap-around, eviction, padding, chunking
    and shuffled pages need no case of their own.
    """

    first: jax.Array  # i32[B, T]
    window_start: jax.Array  # i32[B, T]
    last: jax.Array  # i32[B, T]
    sinks: int = dataclasses.field(default=0, metadata=dict(static=True))

    def mask(self, key_positions: jax.Array) -> jax.Array:
        """Visible keys, bool[B, T, S], of `key_positions` i32[B, S]."""
        first, start, last = (x[..., None] for x in (self.first, self.window_start, self.last))
        return visible(key_positions[:, None, :], first, start, last, self.sinks)

    def live(self, key_positions: jax.Array) -> jax.Array:
        """Slots that some query of the sequence may see, bool[B, S]; may claim too many."""
        first, start = self.first.min(1)[:, None], self.window_start.min(1)[:, None]
        return visible(key_positions, first, start, self.last.max(1)[:, None], self.sinks)


def causal(positions: jax.Array, window: int | None = None) -> Visibility:
    """Every query at `positions` i32[B, T] sees itself and all before it, or a window of them."""
    zero = jnp.zeros_like(positions)
    start = zero if window is None else positions - (window - 1)
    return Visibility(first=zero, window_start=start, last=positions)
