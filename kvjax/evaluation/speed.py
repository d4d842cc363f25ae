"""Wall-clock speed with compile time apart.

JAX returns before the work is done and compiles in the first call of a shape. So every call ends in
`block_until_ready`, the first call is kept apart (first minus steady is about what compiling took),
and the median of the repetitions stands for the steady state.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.config import CacheConfig, LayerPattern
from kvjax.decode.generate import LoopState, generate_loop
from kvjax.decode.prefill import prefill
from kvjax.decode.sampling import Sampler, Sampling
from kvjax.errors import ConfigError
from kvjax.language_model import LanguageModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of a first call and of the steady ones after it.

    Attributes:
        first_s: the first call, compilation included.
        repetitions_s: each later call.

    >>> timing = Timing(first_s=3.0, repetitions_s=(1.0, 0.5, 0.6))
    >>> timing.steady_s, round(timing.compile_s, 3)
    (0.6, 2.4)
    """

    first_s: float
    repetitions_s: tuple[float, ...]

    @property
    def steady_s(self) -> float:
        """Median of the later calls."""
        return statistics.median(self.repetitions_s)

    @property
    def compile_s(self) -> float:
        """First call minus a steady one: tracing, compiling or reading from disk, warm-up."""
        return max(0.0, self.first_s - self.steady_s)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Run `call` to the end of its device work; return the seconds and the result.

    >>> seconds, result = timed(lambda: jnp.ones(3).sum())
    >>> seconds > 0, float(result)
    (True, 3.0)
    """
    start = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - start, result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
    """What `measure_speed` found.

    Attributes:
        prefill: seconds to put the prompts into the cache and get the next token's logits.
        decode: seconds of the generation after it, one step less than there are new tokens.
        prefill_tokens_per_s: prompt tokens of all sequences over the median.
        decode_tokens_per_s: generated tokens of all sequences over the median.
        tokens: greedy continuation of each prompt, end-of-text tokens ignored.
    """

    prefill: Timing
    decode: Timing
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    tokens: list[list[int]]

    @property
    def compile_s(self) -> float:
        """Seconds that the first prefill and the first generation took beyond the steady ones."""
        return self.prefill.compile_s + self.decode.compile_s


def measure_speed(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    cache: CacheConfig | LayerPattern,
    *,
    new_tokens: int,
    repetitions: int,
    max_len: int | None = None,
) -> Speed:
    """Time prefill and greedy generation as `LanguageModel.generate` runs them.

    The first generated token needs no step (prefill gave its logits), so the decode speed is that
    of `new_tokens - 1` steps. Each repetition starts from an empty cache.

    Args:
        lm: the model.
        prompts: token ids, one list a sequence.
        cache: which cache.
        new_tokens: tokens to generate, at least 2.
        repetitions: steady runs, at least 1, after a first one that compiles.
        max_len: capacity of the cache in tokens; None is just enough.
    """
    for name, value, least in (("new_tokens", new_tokens, 2), ("repetitions", repetitions, 1)):
        if value < least:
            raise ConfigError(f"{name}={value} must be at least {least} to measure speed")
    rows = [list(map(int, row)) for row in prompts]
    max_len = max_len or max(map(len, rows)) + new_tokens
    prefills, decodes, tokens = [], [], []
    for _ in range(1 + repetitions):
        empty = jax.block_until_ready(cache.init(lm.dims, len(rows), max_len))
        seconds, (logits, filled) = timed(
            functools.partial(prefill, lm.model, lm.params, empty, rows)
        )
        prefills.append(seconds)
        state, arguments = _loop_arguments(filled, logits, new_tokens)
        seconds, state = timed(
            functools.partial(generate_loop, lm.model, lm.params, state, *arguments)
        )
        decodes.append(seconds)
        state.cache.check()
        tokens = jax.device_get(state.tokens).tolist()
        del empty, filled, state  # two caches at once would count against the larger variants
    timings = [Timing(first_s=s[0], repetitions_s=tuple(s[1:])) for s in (prefills, decodes)]
    return Speed(
        prefill=timings[0],
        decode=timings[1],
        prefill_tokens_per_s=sum(map(len, rows)) / timings[0].steady_s,
        decode_tokens_per_s=len(rows) * (new_tokens - 1) / timings[1].steady_s,
        tokens=tokens,
    )


def _loop_arguments(cache, logits, new_tokens: int) -> tuple[LoopState, tuple]:
    """A generation that starts after prefill: greedy, and no token ends it."""
    B, _ = logits.shape
    state = LoopState.after_prefill(cache, logits, new_tokens)
    no_stops = jnp.full((B, 1), -1, jnp.int32)
    limit = jnp.full(B, new_tokens, jnp.int32)
    return state, (Sampler.of([Sampling()] * B), no_stops, limit, jnp.int32(new_tokens))
