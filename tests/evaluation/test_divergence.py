import numpy as np
import pytest

from kvjax.errors import ConfigError
from kvjax.evaluation import divergence, divergence_of_logits, greedy_divergence


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def pair() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    exact = draw.normal(scale=3, size=(2, 7, 11)).astype(np.float32)
    variant = exact + draw.normal(scale=0.7, size=exact.shape).astype(np.float32)
    return exact, variant, draw.integers(0, 11, size=(2, 7)).astype(np.int32)


def test_kl_is_that_of_numpy(pair) -> None:
    exact, variant, _ = pair
    p, q = softmax(exact), softmax(variant)
    kl, same = divergence_of_logits(exact, variant)
    np.testing.assert_allclose(kl, (p * np.log(p / q)).sum(-1), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(same, exact.argmax(-1) == variant.argmax(-1))
    assert not np.asarray(same).all()


def test_equal_logits_have_no_divergence(pair) -> None:
    exact, _, _ = pair
    kl, same = divergence_of_logits(exact, exact + 5.0)  # a shift changes no probability
    assert np.asarray(same).all()
    np.testing.assert_allclose(kl, 0.0, atol=1e-5)


def test_impossible_tokens_count_for_nothing(pair) -> None:
    exact, variant, _ = pair
    masked = exact.copy()
    masked[..., 3] = -np.inf
    kl, _ = divergence_of_logits(masked, variant)
    assert np.isfinite(kl).all()


def test_direction_is_from_exact_to_variant() -> None:
    sure, unsure = np.array([[[9.0, 0.0]]], np.float32), np.zeros((1, 1, 2), np.float32)
    forward, _ = divergence_of_logits(sure, unsure)
    backward, _ = divergence_of_logits(unsure, sure)
    assert float(forward[0, 0]) == pytest.approx(np.log(2), abs=2e-3)
    assert float(backward[0, 0]) > 3


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunk_by_chunk(pair, chunk: int) -> None:
    exact, variant, tokens = pair
    starts = range(0, 7, chunk)
    found = divergence(
        [(s, exact[:, s : s + chunk]) for s in starts],
        iter([(s, variant[:, s : s + chunk]) for s in starts]),
        tokens,
    )
    kl, same = divergence_of_logits(exact[:, :-1], variant[:, :-1])
    np.testing.assert_allclose(found.kl, kl, atol=1e-5)
    np.testing.assert_array_equal(found.top1, same)
    q = softmax(variant[:, :-1])
    nll = -np.log(np.take_along_axis(q, tokens[:, 1:, None], axis=-1)[..., 0])
    np.testing.assert_allclose(found.nll, nll, atol=1e-4)
    assert found.mean_kl(3) == pytest.approx(np.asarray(kl)[:, 2:].mean(), rel=1e-5)
    assert found.top1_agreement(3) == pytest.approx(np.asarray(same)[:, 2:].mean())


def test_different_chunks_are_refused(pair) -> None:
    exact, variant, tokens = pair
    with pytest.raises(ConfigError, match="same chunk"):
        divergence([(0, exact)], [(0, variant[:, :3])], tokens)


@pytest.mark.parametrize(
    ("variant", "index"), [([1, 2, 3], 3), ([9, 2, 3], 0), ([1, 2, 4], 2), ([1, 2], 2), ([], 0)]
)
def test_greedy_divergence(variant: list[int], index: int) -> None:
    assert greedy_divergence([1, 2, 3], variant) == index
