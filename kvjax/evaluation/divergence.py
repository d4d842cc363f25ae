"""How far a variant strays from the exact cache: KL, top-1 agreement, greedy divergence point."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import ConfigError
from kvjax.evaluation.perplexity import Chunks, next_tokens, token_nll, trim_predictions


@jax.jit
def divergence_of_logits(
    exact: jax.Array,  # [B, T, V]
    variant: jax.Array,  # [B, T, V]
) -> tuple[jax.Array, jax.Array]:  # f32[B, T], bool[B, T]
    """Compare two distributions over the vocabulary at each position.

    KL(exact || variant) = sum_v p_exact(v) (log p_exact(v) - log p_variant(v)), in nats and f32.

    Returns:
        KL of each position, and whether both put the same token first.

    >>> kl, same = divergence_of_logits(jnp.zeros((1, 1, 4)), jnp.zeros((1, 1, 4)))
    >>> kl.tolist(), same.tolist()
    ([[0.0]], [[True]])
    """
    log_p = jax.nn.log_softmax(exact.astype(jnp.float32), axis=-1)
    log_q = jax.nn.log_softmax(variant.astype(jnp.float32), axis=-1)
    # p log p is 0 where p is 0, also where the exact logits are -inf.
    terms = jnp.where(log_p > -jnp.inf, jnp.exp(log_p) * (log_p - log_q), 0.0)
    # Rounding leaves some -1e-8 where the distributions are equal.
    kl = jnp.maximum(terms.sum(axis=-1), 0.0)
    return kl, exact.argmax(axis=-1) == variant.argmax(axis=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """Scores of a teacher-forced run; entry i belongs to the prediction of the token at i + 1.

    Attributes:
        nll: of the text under the variant, in nats, f32[B, T - 1].
        kl: KL(exact || variant) in nats, f32[B, T - 1].
        top1: whether both put the same token first, bool[B, T - 1].
    """

    nll: np.ndarray
    kl: np.ndarray
    top1: np.ndarray

    def mean_kl(self, start: int = 1) -> float:
        """Mean KL in nats over the predictions of the tokens at positions >= start."""
        return float(np.mean(self.kl[:, start - 1 :], dtype=np.float64))

    def top1_agreement(self, start: int = 1) -> float:
        """Share of those predictions where both put the same token first."""
        return float(np.mean(self.top1[:, start - 1 :], dtype=np.float64))


def divergence(
    exact: Chunks,
    variant: Chunks,
    tokens: np.ndarray,  # i32[B, T]
) -> Divergence:
    """Score a variant's teacher-forced run against the exact one, chunk by chunk.

    `exact` may be logits kept in host memory (a list of numpy chunks: 4 V bytes a token) or a
    second run that goes along: only one chunk of each is looked at at a time.

    Args:
        exact: (start, logits [B, t, V]) of the exact cache.
        variant: the same positions in the same chunks under the variant.
        tokens: the text that was fed, [B, T].

    >>> logits = np.zeros((1, 2, 4), np.float32)
    >>> divergence([(0, logits)], [(0, logits)], np.zeros((1, 2), np.int32)).top1_agreement()
    1.0
    """
    tokens = np.asarray(tokens, np.int32)
    pieces = []
    for (start, p), (also, q) in zip(exact, variant, strict=True):
        if start != also or p.shape != q.shape:
            raise ConfigError(
                f"chunks differ: exact {p.shape} at {start}, variant {q.shape} at {also}; "
                "run both with the same chunk"
            )
        p, q = jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32)
        nll = token_nll(q, next_tokens(tokens, start, q))
        pieces.append(jax.device_get((nll, *divergence_of_logits(p, q))))
    nll, kl, top1 = (
        trim_predictions(np.concatenate(part, axis=1), tokens) for part in zip(*pieces, strict=True)
    )
    return Divergence(nll=nll, kl=kl, top1=top1)


def greedy_divergence(exact: Sequence[int], variant: Sequence[int]) -> int:
    """Find the first index at which two greedy continuations differ.

    Their common length if they never do, so that more is always better.

    >>> greedy_divergence([3, 4, 5], [3, 4, 9])
    2
    >>> greedy_divergence([3, 4], [3, 4])
    2
    """
    common = min(len(exact), len(variant))
    return next((i for i in range(common) if exact[i] != variant[i]), common)
