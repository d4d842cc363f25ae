"""What the decode tests share: caches of every kind, and the uncached truth."""

from collections.abc import Sequence

import jax
import numpy as np

from kvjax import CacheConfig, Codecs, Int, LayerPattern, Paged, SinkWindow, Window
from kvjax.language_model import LanguageModel
from tests.tolerances import TINY_FLIPPED, TINY_LOGITS

EXACT = {
    "contiguous": CacheConfig(),
    "paged": CacheConfig(layout=Paged(page_size=16), positions="unrotated_absolute"),
    # Windows longer than any text here, with a ring and with pages.
    "long windows": LayerPattern(
        CacheConfig(policy=Window(window=200), layout=Paged(page_size=4)),
        {0: CacheConfig(policy=SinkWindow(sinks=2, window=200))},
    ),
}
# Two layers, two lossy caches: each pattern is compiled once and covers both.
LOSSY = {
    "int8, window of int4 in pages": LayerPattern(
        CacheConfig(codec=Int(bits=8, scale_dtype="float32")),
        {
            1: CacheConfig(
                layout=Paged(page_size=4),
                codec=Int(bits=4, group_size=8, symmetric=True, scale_dtype="float32"),
                policy=Window(window=9),
            )
        },
    ),
    "channel keys with slack, stream": LayerPattern(
        CacheConfig(
            layout=Paged(page_size=8),
            codec=Codecs(
                k=Int(bits=4, axis="channel", group_size=4, scale_dtype="float32"),
                v=Int(bits=4, scale_dtype="float32"),
            ),
            slack=3,
        ),
        {
            1: CacheConfig(
                codec=Codecs(
                    k=Int(bits=4, axis="channel", group_size=4, scale_dtype="float32"),
                    v=Int(bits=8, scale_dtype="float32"),
                ),
                policy=SinkWindow(sinks=4, window=7),
                positions="unrotated_slot",
            )
        },
    ),
}
CACHES = {**EXACT, **LOSSY}


def uncached_logits(lm: LanguageModel, rows: Sequence[Sequence[int]], width: int = 64) -> list:
    """Logits [len(row), V] of each row, without a cache; one compiled shape a batch size."""
    padded = np.zeros((len(rows), width), np.int32)
    for b, row in enumerate(rows):
        padded[b, : len(row)] = row
    logits = np.asarray(lm.logits(padded))  # causal: the padding after a row changes nothing
    return [logits[b, : len(row)] for b, row in enumerate(rows)]


def assert_same_scores(got, want, what: str = "") -> None:
    """Rows of scores are equal but for a code here and there that was rounded the other way."""
    got, want = np.asarray(got), np.asarray(want)
    np.testing.assert_allclose(got, want, atol=TINY_FLIPPED, rtol=0, err_msg=what)
    flipped = (np.abs(got - want) > TINY_LOGITS).any(axis=1)
    assert flipped.mean() <= 0.5, f"{what}: {flipped.sum()} of {flipped.size} rows differ"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(logits))
