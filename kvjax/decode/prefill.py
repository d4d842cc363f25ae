"""Prefill of a ragged batch: chunked, in a few chunk lengths, so that new prompts never compile."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.cache import Cache
from kvjax.decode.step import prefill_step

CHUNKS = (16, 64, 256)  # chunk lengths that are compiled, in tokens a sequence


def chunk_length(tokens: int, longest: int = CHUNKS[-1]) -> int:
    """Smallest compiled chunk length that holds `tokens`, at most `longest`.

    >>> chunk_length(5), chunk_length(65), chunk_length(1000)
    (16, 256, 256)
    """
    for length in (*(c for c in CHUNKS if c < longest), longest):
        if tokens <= length:
            return length
    return longest


def chunks(
    rows: Sequence[Sequence[int]], longest: int = CHUNKS[-1]
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Cut a ragged batch into padded chunks: pairs (tokens i32[B, T], counts i32[B])."""
    start, end = 0, max(map(len, rows))
    while start < end:
        T = chunk_length(end - start, longest)
        tokens = np.zeros((len(rows), T), np.int32)
        counts = np.zeros(len(rows), np.int32)
        for b, row in enumerate(rows):
            piece = row[start : start + T]
            tokens[b, : len(piece)], counts[b] = piece, len(piece)
        yield jnp.asarray(tokens), jnp.asarray(counts)
        start += T


def prefill(
    model: Any, params: Any, cache: Cache, rows: Sequence[Sequence[int]]
) -> tuple[jax.Array, Cache]:
    """Append the prompts `rows`, one a sequence of the (donated) cache.

    Returns:
        logits f32[B, V] after each prompt's last token, and the cache.
    """
    last = None
    for tokens, counts in chunks(rows):
        logits, cache = prefill_step(model, params, tokens, counts, cache)
        last = logits if last is None else jnp.where((counts > 0)[:, None], logits, last)
    assert last is not None, "prompts are checked not to be empty"
    return last, cache
