"""Chunks of ragged prompts, and scores that do not depend on how a text was cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax import CacheConfig, Int, Paged
from kvjax.decode import CHUNKS, assert_max_traces, chunk_length, chunks, decode_step, prefill
from kvjax.errors import ConfigError
from tests.decode.models import (
    CACHES,
    EXACT,
    LOSSY,
    assert_same_scores,
    log_softmax,
    uncached_logits,
)
from tests.models import tiny
from tests.tolerances import TINY_BFLOAT16, TINY_LOGITS, TINY_LOST


class TestChunks:
    @given(st.lists(st.integers(1, 700), min_size=1, max_size=4), st.sampled_from([7, 64, 256]))
    def test_every_token_comes_once_and_in_order(self, lengths: list[int], longest: int):
        rows = [[100 * b + i % 97 for i in range(n)] for b, n in enumerate(lengths)]
        seen: list[list[int]] = [[] for _ in rows]
        for tokens, counts in chunks(rows, longest):
            T = tokens.shape[1]
            assert longest == T or (T in CHUNKS and longest > T)
            for b, n in enumerate(np.asarray(counts)):
                seen[b] += np.asarray(tokens)[b, :n].tolist()
        assert seen == rows

    def test_few_lengths_are_ever_compiled(self):
        assert {chunk_length(n) for n in range(1, 2000)} == set(CHUNKS)
        assert [chunk_length(n) for n in (1, 16, 17, 64, 65, 256, 257)] == [
            16, 16, 64, 64, 256, 256, 256,
        ]  # fmt: skip
        assert {chunk_length(n, longest=1) for n in range(1, 50)} == {1}


class TestPrefill:
    @pytest.mark.parametrize("name", EXACT)
    def test_last_logits_equal_the_uncached(self, name: str):
        """A row that ends in an earlier chunk keeps the logits of its own last token."""
        lm = tiny(scale=1.0)
        rng = np.random.default_rng(0)
        rows = [rng.integers(0, 97, n).tolist() for n in (1, 60, 16, 17)]
        logits, cache = prefill(lm.model, lm.params, EXACT[name].init(lm.dims, 4, 64), rows)
        assert cache.check().lengths.tolist() == [1, 60, 16, 17]
        for b, whole in enumerate(uncached_logits(lm, rows)):
            np.testing.assert_allclose(logits[b], whole[-1], atol=TINY_LOGITS, err_msg=str(b))

    def test_prompts_of_several_chunks(self):
        lm = tiny(scale=1.0, num_layers=1)
        rng = np.random.default_rng(1)
        rows = [rng.integers(0, 97, n).tolist() for n in (300, 5, 256, 257)]
        config = CacheConfig(layout=Paged(page_size=16))
        logits, cache = prefill(lm.model, lm.params, config.init(lm.dims, 4, 320), rows)
        for b, whole in enumerate(uncached_logits(lm, rows, width=304)):
            np.testing.assert_allclose(logits[b], whole[-1], atol=TINY_LOGITS, err_msg=str(b))
        # ... and what was stored serves the next step.
        following = np.array([1, 2, 3, 4], np.int32)
        logits, _ = decode_step(lm.model, lm.params, following, np.ones(4, bool), cache)
        longer = [[*row, int(t)] for row, t in zip(rows, following, strict=True)]
        for b, whole in enumerate(uncached_logits(lm, longer, width=304)):
            np.testing.assert_allclose(logits[b], whole[-1], atol=TINY_LOGITS, err_msg=str(b))

    def test_a_longer_prompt_of_known_chunks_compiles_nothing(self):
        lm = tiny(scale=1.0, num_layers=1)
        config = CacheConfig(layout=Paged(page_size=16))
        with assert_max_traces(extend_step=3):  # one a chunk length
            for n in (300, 310, 20, 64, 3, 16, 280, 512, 2):
                prefill(lm.model, lm.params, config.init(lm.dims, 1, 513), [[1] * n])


TEXT = np.random.default_rng(4).integers(0, 97, (4, 40))


class TestLogLikelihood:
    @pytest.mark.parametrize("name", CACHES)
    def test_scores_do_not_depend_on_the_chunks(self, name: str):
        """Token by token (the decode path), in sevens, and at once; lossy caches too."""
        lm, cache = tiny(scale=1.0), CACHES[name]
        lengths = (1, 7, 256) if name in ("contiguous", *LOSSY) else (1, 256)
        scores = {chunk: lm.log_likelihood(TEXT, cache, chunk) for chunk in lengths}
        uncached = log_softmax(np.asarray(lm.logits(TEXT)))
        uncached = np.take_along_axis(uncached[:, :-1], TEXT[:, 1:, None], axis=-1)[..., 0]
        for chunk, got in scores.items():
            assert got.shape == (4, 39) and got.dtype == np.float32
            if name in EXACT:
                np.testing.assert_allclose(got, uncached, atol=TINY_LOGITS, err_msg=str(chunk))
            assert_same_scores(got, scores[1], f"{chunk=}")
        if name in LOSSY:
            assert np.abs(scores[1] - uncached).max() > TINY_LOST, "little was lost: a weak test"

    @pytest.mark.parametrize("name", ["contiguous", "paged"])
    def test_narrow_models(self, name: str):
        """A bf16 model, whose cache may hold words instead of floats."""
        lm = tiny(scale=1.0, dtype="bfloat16")
        scores = [lm.log_likelihood(TEXT, EXACT[name], chunk) for chunk in (1, 256)]
        uncached = log_softmax(np.asarray(lm.logits(TEXT)))
        uncached = np.take_along_axis(uncached[:, :-1], TEXT[:, 1:, None], axis=-1)[..., 0]
        for got in scores:
            np.testing.assert_allclose(got, uncached, atol=TINY_BFLOAT16)

    @pytest.mark.parametrize("chunk", [1, 7])
    def test_exact_logits_equal_the_uncached(self, chunk: int):
        lm = tiny(scale=1.0)
        pieces = list(lm.teacher_forced(TEXT, chunk=chunk))
        assert [start for start, _ in pieces] == list(range(0, 40, chunk))
        logits = np.concatenate([piece for _, piece in pieces], axis=1)
        np.testing.assert_allclose(logits, lm.logits(TEXT), atol=TINY_LOGITS)

    def test_a_row_equals_itself_alone(self):
        lm, cache = tiny(scale=1.0), CacheConfig(codec=Int(bits=8, scale_dtype="float32"))
        together = lm.log_likelihood(TEXT, cache, chunk=7)
        alone = [lm.log_likelihood(row, cache, chunk=7)[0] for row in TEXT]
        assert_same_scores(alone, together)

    def test_one_token_has_nothing_to_score(self):
        scores = tiny(num_layers=1).log_likelihood([[1], [2]])
        assert scores.shape == (2, 0) and scores.dtype == np.float32

    @pytest.mark.parametrize("chunk", [0, -1])
    def test_chunks_of_nothing_are_refused(self, chunk: int):
        with pytest.raises(ConfigError, match=f"chunk={chunk}"):
            tiny(num_layers=1).log_likelihood([[1, 2]], chunk=chunk)

    @pytest.mark.parametrize("tokens", [[], [[]], [[1.5, 2.0]], [[[1, 2]]], [[1, 2], [3]]])
    def test_what_is_no_batch_of_tokens(self, tokens):
        with pytest.raises(ConfigError, match="tokens"):
            tiny(num_layers=1).log_likelihood(tokens)
