"""Negative log-likelihood of real text, teacher-forced through a cache, and its perplexity.

Positions count from 0. The token at position 0 has no prediction, so the NLL of a text of T tokens
has T - 1 entries and entry i belongs to the token at position i + 1.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import ConfigError

Chunks = Iterable[tuple[int, jax.Array | np.ndarray]]  # (start, logits f32 [B, t, V])


@jax.jit
def token_nll(
    logits: jax.Array,  # [B, T, V]
    targets: jax.Array,  # i32[B, T]
) -> jax.Array:  # f32[B, T]
    """Compute -log softmax(logits)[target] of each token, in nats and f32.

    >>> token_nll(jnp.zeros((1, 1, 8)), jnp.zeros((1, 1), jnp.int32)).round(4).tolist()
    [[2.0794...]]
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def nll_from_chunks(
    chunks: Chunks,
    tokens: np.ndarray,  # i32[B, T]
) -> np.ndarray:  # f32[B, T - 1]
    """Score a teacher-forced run chunk by chunk.

    Args:
        chunks: (start, logits [B, t, V]) in order, as `LanguageModel.teacher_forced` yields them;
            the logits at position p predict the token at p + 1.
        tokens: the text that was fed, [B, T].

    Returns:
        NLL in nats, [B, T - 1]; entry i is that of the token at position i + 1.

    >>> tokens = np.zeros((1, 4), np.int32)
    >>> nll_from_chunks([(0, np.zeros((1, 3, 2))), (3, np.zeros((1, 1, 2)))], tokens).shape
    (1, 3)
    """
    tokens = np.asarray(tokens, np.int32)
    pieces = []
    for start, logits in chunks:
        nll = token_nll(jnp.asarray(logits, jnp.float32), next_tokens(tokens, start, logits))
        pieces.append(np.asarray(nll))
    return trim_predictions(np.concatenate(pieces, axis=1), tokens)


def next_tokens(
    tokens: np.ndarray,  # i32[B, T]
    start: int,
    logits: jax.Array | np.ndarray,  # [B, t, V]
) -> np.ndarray:  # i32[B, t]
    """Tokens that the logits of positions [start, start + t) predict.

    The last position of the text has nothing to predict: it gets token 0, so that a chunk keeps
    its shape and compiles once; `trim_predictions` takes it away.

    >>> next_tokens(np.array([[5, 6, 7]]), 1, np.zeros((1, 2, 9))).tolist()
    [[7, 0]]
    """
    _, t, _ = logits.shape
    _, T = tokens.shape
    if start + t > T:
        raise ConfigError(f"logits reach position {start + t - 1}, but the text has {T} tokens")
    return np.pad(tokens[:, start + 1 : start + t + 1], ((0, 0), (0, max(0, start + t + 1 - T))))


def trim_predictions(
    values: np.ndarray,  # [B, T]
    tokens: np.ndarray,  # [B, T]
) -> np.ndarray:  # [B, T - 1]
    """Drop the value of the last position, which predicts nothing; check that none is missing."""
    if values.shape != tokens.shape:
        raise ConfigError(
            f"the chunks cover {values.shape} positions of a text of {tokens.shape} tokens"
        )
    return values[:, :-1]


def perplexity(
    nll: np.ndarray,  # f32[B, T - 1]
    start: int = 1,
    stop: int | None = None,
) -> float:
    """Compute exp(mean NLL) over the tokens at positions [start, stop).

    Args:
        nll: NLL of the tokens at positions 1 .. T - 1.
        start: first position that counts, at least 1.
        stop: position after the last that counts; None is the end of the text.

    Raises:
        ConfigError: the range holds no token.

    >>> round(perplexity(np.log([[9.0, 2.0, 8.0]]), start=2), 6)
    4.0
    """
    _, predictions = nll.shape
    end = predictions + 1 if stop is None else stop
    if not 1 <= start < end <= predictions + 1:
        raise ConfigError(
            f"no tokens to score in positions [{start}, {end}) of a text of {predictions + 1}; "
            f"start must be at least 1 and stop at most {predictions + 1}"
        )
    # f64: the mean of many f32 terms must not depend on their order.
    return float(np.exp(np.mean(nll[:, start - 1 : end - 1], dtype=np.float64)))
