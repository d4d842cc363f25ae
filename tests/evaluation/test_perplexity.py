import numpy as np
import pytest

from kvjax.errors import ConfigError
from kvjax.evaluation import nll_from_chunks, perplexity, token_nll
from kvjax.testing.tiny import tiny_lm


def numpy_nll(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    log_p = wide - np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1, keepdims=True))
    log_p -= wide.max(-1, keepdims=True)
    return -np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]


@pytest.fixture(scope="module")
def text() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    logits = draw.normal(scale=4, size=(2, 9, 13)).astype(np.float32)
    return logits, draw.integers(0, 13, size=(2, 9)).astype(np.int32)


def test_token_nll_is_that_of_numpy(text) -> None:
    logits, tokens = text
    np.testing.assert_allclose(token_nll(logits, tokens), numpy_nll(logits, tokens), atol=2e-5)


@pytest.mark.parametrize("cuts", [[9], [4, 5], [4, 4, 1], [1] * 9])
def test_chunks_do_not_matter(text, cuts: list[int]) -> None:
    logits, tokens = text
    starts = np.cumsum([0, *cuts[:-1]])
    chunks = [(int(s), logits[:, s : s + t]) for s, t in zip(starts, cuts, strict=True)]
    nll = nll_from_chunks(chunks, tokens)
    np.testing.assert_allclose(nll, numpy_nll(logits[:, :-1], tokens[:, 1:]), atol=2e-5)


def test_perplexity_over_a_range(text) -> None:
    logits, tokens = text
    nll = nll_from_chunks([(0, logits)], tokens)
    # Position p is entry p - 1: positions 3, 4, 5.
    assert perplexity(nll, start=3, stop=6) == pytest.approx(np.exp(nll[:, 2:5].mean()), rel=1e-6)
    assert perplexity(nll) == pytest.approx(np.exp(nll.mean()), rel=1e-6)


@pytest.mark.parametrize(("start", "stop"), [(0, None), (9, None), (4, 4), (1, 10)])
def test_perplexity_refuses_an_empty_range(text, start, stop) -> None:
    logits, tokens = text
    with pytest.raises(ConfigError, match="no tokens to score"):
        perplexity(nll_from_chunks([(0, logits)], tokens), start, stop)


def test_chunks_that_miss_tokens_are_refused(text) -> None:
    logits, tokens = text
    with pytest.raises(ConfigError, match="cover"):
        nll_from_chunks([(0, logits[:, :4])], tokens)
    with pytest.raises(ConfigError, match="reach position"):
        nll_from_chunks([(8, logits[:, :4])], tokens)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_model_scores_text_alike_in_chunks_and_token_by_token(chunk: int) -> None:
    lm = tiny_lm(num_layers=1)
    tokens = np.random.default_rng(1).integers(0, 97, size=(1, 20)).astype(np.int32)
    exact = numpy_nll(np.asarray(lm.logits(tokens))[:, :-1], tokens[:, 1:])
    nll = nll_from_chunks(lm.teacher_forced(tokens, chunk=chunk), tokens)
    np.testing.assert_allclose(nll, exact, atol=1e-4)
