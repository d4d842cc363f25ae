"""Generation: one `lax.while_loop` on the device, checked for room before it starts."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.cache import Cache
from kvjax.decode.prefill import prefill
from kvjax.decode.sampling import Sampler, Sampling
from kvjax.decode.step import one_token
from kvjax.decode.tracing import count_trace

REASONS = ("running", "stop", "length", "not finite")
RUNNING, STOP, LENGTH, NOT_FINITE = range(4)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoopState:
    """What one generated token changes."""

    cache: Cache
    logits: jax.Array  # f32[B, V], of the next token
    tokens: jax.Array  # i32[B, X], the output; X is a bucket of max_new_tokens
    logprobs: jax.Array  # f32[B, X]
    seen: jax.Array  # bool[B, V], or [B, 0] where no penalty asks for it
    counts: jax.Array  # i32[B], tokens of each output
    reason: jax.Array  # i32[B], index into REASONS
    step: jax.Array  # i32[]

    @classmethod
    def after_prefill(
        cls, cache: Cache, logits: jax.Array, width: int, seen: jax.Array | None = None
    ) -> "LoopState":
        """No token yet: `logits` are the prompt's, the output holds up to `width` tokens."""
        B, _ = logits.shape
        return cls(
            cache=cache,
            logits=logits,
            tokens=jnp.zeros((B, width), jnp.int32),
            logprobs=jnp.zeros((B, width), jnp.float32),
            seen=jnp.zeros((B, 0), bool) if seen is None else seen,
            counts=jnp.zeros(B, jnp.int32),
            reason=jnp.zeros(B, jnp.int32),
            step=jnp.int32(0),
        )


@functools.partial(jax.jit, static_argnames=("model",), donate_argnames=("state",))
def generate_loop(
    model: Any,
    params: Any,
    state: LoopState,
    sampler: Sampler,
    stops: jax.Array,
    limit: jax.Array,
    until: jax.Array,
) -> LoopState:
    """Generate until every sequence has ended or the step reaches `until`.

    Args:
        model: a `Transformer`; static.
        params: its parameters.
        state: donated.
        sampler: settings.
        stops: i32[B, X], tokens that end a sequence (they are part of the output); -1 is none.
        limit: i32[B], most tokens of each output.
        until: i32[], step at which to return; streaming asks for one step more each time.
    """
    count_trace("generate_loop")
    rows = jnp.arange(stops.shape[0], dtype=jnp.int32)

    def take(state: LoopState) -> LoopState:
        """Draw a token from the logits and see who has ended."""
        running = state.reason == RUNNING
        # -inf is a token that cannot be; NaN and inf leave no distribution.
        finite = ~(jnp.isnan(state.logits) | jnp.isposinf(state.logits)).any(-1)
        token = sampler.sample(state.logits, state.step, state.seen)
        logprob = jax.nn.log_softmax(state.logits)[rows, token]
        writes = running & finite
        column = jnp.where(writes, state.step, state.tokens.shape[1])
        counts = state.counts + writes.astype(jnp.int32)
        reason = jnp.where(counts >= limit, jnp.int32(LENGTH), jnp.int32(RUNNING))
        reason = jnp.where((token[:, None] == stops).any(-1), jnp.int32(STOP), reason)
        reason = jnp.where(finite, reason, jnp.int32(NOT_FINITE))
        seen = state.seen
        if sampler.penalizes:
            seen = seen.at[rows, token].max(writes)
        return dataclasses.replace(
            state,
            tokens=state.tokens.at[rows, column].set(token, mode="drop"),
            logprobs=state.logprobs.at[rows, column].set(logprob, mode="drop"),
            seen=seen,
            counts=counts,
            reason=jnp.where(running, reason, state.reason),
            step=state.step + 1,
        )

    def feed(state: LoopState) -> LoopState:
        """Append the newest token of the running sequences; the others stay as they are."""
        newest = lax.dynamic_index_in_dim(state.tokens, state.step - 1, axis=1, keepdims=False)
        running = state.reason == RUNNING
        logits, cache = one_token(model, params, newest, running, state.cache)
        logits = jnp.where(running[:, None], logits, state.logits)
        return dataclasses.replace(state, logits=logits, cache=cache)

    def unfinished(state: LoopState):
        return (state.step < until) & (state.reason == RUNNING).any()

    # The first token needs no step: prefill gave its logits. Later calls go on where one ended.
    state = lax.cond(state.step == 0, take, lambda s: s, state)
    return lax.while_loop(unfinished, lambda s: take(feed(s)), state)


def generate(
    model: Any,
    params: Any,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    max_new_tokens: int,
    settings: Sequence[Sampling],
    stops: Sequence[Sequence[int]],
    on_token: Callable[[int, int], None] | None = None,
) -> tuple[list[list[int]], list[list[float]], list[str], Cache]:
    """Prefill `prompts` into a fresh cache and generate; see `LanguageModel.generate`.

    Returns:
        new tokens, their log-probabilities, the reason of each end, and the cache, which holds all
        but the last token of each output.
    """
    B = len(prompts)
    logits, cache = prefill(model, params, cache, prompts)
    sampler = Sampler.of(settings)
    seen = _seen(prompts, vocab_size if sampler.penalizes else 0)
    state = LoopState.after_prefill(cache, logits, bucket(max_new_tokens), seen)
    stop_ids = np.full((B, bucket(max([1, *map(len, stops)]), 4)), -1, np.int32)
    for b, ids in enumerate(stops):
        stop_ids[b, : len(ids)] = ids
    limit = jnp.full(B, max_new_tokens, jnp.int32)
    run = functools.partial(generate_loop, model, params)
    arguments = (sampler, jnp.asarray(stop_ids), limit)
    if on_token is None:
        state = run(state, *arguments, jnp.int32(max_new_tokens))
    else:
        told = np.zeros(B, np.int32)
        while (state.step == 0) or bool((state.reason == RUNNING).any()):
            state = run(state, *arguments, state.step + 1)
            counts, column = jax.device_get((state.counts, state.tokens[:, state.step - 1]))
            for b in np.flatnonzero(counts > told):
                on_token(int(b), int(column[b]))
            told = counts
    state.cache.check()
    counts, tokens, logprobs, reasons = jax.device_get(
        (state.counts, state.tokens, state.logprobs, state.reason)
    )
    return (
        [row[:n].tolist() for row, n in zip(tokens, counts, strict=True)],
        [row[:n].tolist() for row, n in zip(logprobs, counts, strict=True)],
        [REASONS[r] for r in reasons],
        state.cache,
    )


def bucket(size: int, least: int = 64) -> int:
    """Round up to a power of two, at least `least`: sizes that share one compiled program.

    >>> bucket(5), bucket(64), bucket(65)
    (64, 64, 128)
    """
    return max(least, 1 << (size - 1).bit_length())


def _seen(prompts, vocab_size: int) -> jax.Array:
    seen = np.zeros((len(prompts), vocab_size), bool)
    if vocab_size:
        for b, prompt in enumerate(prompts):
            seen[b, list(prompt)] = True
    return jnp.asarray(seen)
