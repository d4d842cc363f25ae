"""Run by `test_jax.py` in a process of its own: the same decoding with and without 64-bit types."""

import json

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import CacheConfig, Codecs, Int, LayerPattern, Paged, SinkWindow, Window
from kvjax.decode import Sampling, generate
from kvjax.testing.tiny import tiny_lm

SLACK = 2
CONFIG = LayerPattern(
    CacheConfig(layout=Paged(page_size=4), codec=Int(bits=8), policy=Window(window=6), slack=SLACK),
    {
        1: CacheConfig(
            codec=Codecs(k=Int(bits=4, axis="channel", group_size=4), v=Int(bits=4, group_size=8)),
            policy=SinkWindow(sinks=4, window=6),
            positions="unrotated_slot",
            slack=SLACK,
        )
    },
)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
SETTINGS = [Sampling(), Sampling(temperature=1.0, top_k=20, repetition_penalty=1.1, seed=3)]


def decode() -> dict:
    """Tokens and scores, and the dtypes of what the cache holds, after any operation."""
    lm = tiny_lm()
    tokens, logprobs, reasons, cache = generate(
        lm.model,
        lm.params,
        CONFIG.init(lm.dims, len(PROMPTS), 32),
        PROMPTS,
        vocab_size=lm.config.vocab_size,
        max_new_tokens=12,
        settings=SETTINGS,
        stops=[[], [3]],
    )
    back = cache.rollback(cache.lengths - SLACK).advance(jnp.array([1, 0]))
    moved = [cache, back, back.reorder(jnp.array([1, 0])), back.fork(np.array([0, 1, 1]))]
    return {
        "tokens": tokens,
        "reasons": reasons,
        "lengths": [c.lengths.tolist() for c in moved],
        "dtypes": [[x.dtype.name for x in jax.tree.leaves(c)] for c in moved],
        "logprobs": logprobs[0],
    }


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    runs = {}
    for wide in (False, True):
        with jax.enable_x64(wide):
            assert jnp.zeros(1).dtype == ("float64" if wide else "float32")
            runs["x64" if wide else "x32"] = decode()
    print(json.dumps(runs))
