"""Conversions: exact where they claim to be, errors that are those of an independent count."""

import dataclasses

import numpy as np
import pytest

from kvjax import CacheConfig
from kvjax.conversion import to_grouped, to_latent
from kvjax.errors import ConfigError
from kvjax.nn.config import AttentionConfig, TransformerConfig
from kvjax.nn.rotary import Frequencies, Linear, RotaryConfig
from kvjax.testing.tiny import tiny_lm
from tests.models import tiny
from tests.tolerances import TINY_LOGITS

SIZES = dict(num_heads=6, num_kv_heads=2, head_dim=10, d_model=60, scale=1.5)
TOKENS = np.random.default_rng(0).integers(0, 97, (2, 33))


def kernel(lm, layer: int, name: str) -> np.ndarray:
    return np.asarray(lm.params["params"][f"layers_{layer}"]["attention"][name]["kernel"]).T


def test_a_full_latent_with_all_rotations_is_the_same_model() -> None:
    lm = tiny(**SIZES)
    latent, report = to_latent(lm, latent_dim=20)
    assert latent.dims.fields == {"c": 20, "k_rope": 20}
    np.testing.assert_allclose(latent.logits(TOKENS), lm.logits(TOKENS), atol=TINY_LOGITS)
    assert max(max(dataclasses.astuple(layer)) for layer in report.layers) < 1e-6
    # Through a cache it is absorbed, in pages, and as long as the text.
    cache = CacheConfig(layout="paged(page_size=4)")
    decoded = [logits for _, logits in latent.teacher_forced(TOKENS, cache, chunk=1)]
    np.testing.assert_allclose(np.concatenate(decoded, axis=1), lm.logits(TOKENS), atol=TINY_LOGITS)


def test_partial_rotary_and_its_scaling_are_carried_over() -> None:
    base = TransformerConfig.llama(
        vocab_size=97, num_layers=2, d_model=40, num_heads=4, num_kv_heads=2, head_dim=10,
        d_ff=48, max_len=128,
    )  # fmt: skip
    rotary = RotaryConfig(dims=6, theta=100.0, scaling=Linear(factor=2.0), magnitude=1.3)
    layers = [dataclasses.replace(layer, rotary=rotary, window=9) for layer in base.layers]
    lm = tiny_lm(dataclasses.replace(base, layers=tuple(layers)), scale=1.5)
    latent, report = to_latent(lm, latent_dim=28)
    assert latent.dims.windows == (9, 9)
    np.testing.assert_allclose(latent.logits(TOKENS), lm.logits(TOKENS), atol=TINY_LOGITS)
    assert max(layer.unrotated for layer in report.layers) == 0


@pytest.mark.parametrize("calibrated", [False, True], ids=["matrices", "text"])
def test_errors_are_those_of_the_rebuilt_matrices(calibrated: bool) -> None:
    lm = tiny(**SIZES)
    latent, report = to_latent(lm, 12, 4, TOKENS if calibrated else None)
    v = kernel(lm, 0, "qkv")[-20:]
    down = kernel(latent, 0, "latent")[:12]
    up = np.asarray(latent.params["params"]["layers_0"]["attention"]["value_up"])
    rebuilt = up[[0, 3]].reshape(20, 12) @ down  # the first query head of each KV head
    if not calibrated:
        error = np.linalg.norm(rebuilt - v) / np.linalg.norm(v)
        assert report.layers[0].values == pytest.approx(error, rel=1e-4)
        return
    # On its own text the calibrated factor is better than the other one.
    plain, _ = to_latent(lm, 12, 4)
    table = np.asarray(lm.params["params"]["embed"]["embedding"]).T
    x = table[TOKENS.reshape(-1)]
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5)  # norm scales are 1

    def error_on_text(model) -> float:
        up = np.asarray(model.params["params"]["layers_0"]["attention"]["value_up"])
        got = x @ (up[[0, 3]].reshape(20, 12) @ kernel(model, 0, "latent")[:12]).T
        return float(np.linalg.norm(got - x @ v.T) / np.linalg.norm(x @ v.T))

    assert report.layers[0].values == pytest.approx(error_on_text(latent), rel=1e-3)
    assert error_on_text(latent) < error_on_text(plain)


def test_a_wider_latent_loses_less_and_bytes_follow() -> None:
    lm = tiny(**SIZES)
    reports = [to_latent(lm, C, 4)[1] for C in (8, 16, 24, 32)]
    values = [report.layers[0].values for report in reports]
    assert values == sorted(values, reverse=True) and values[-1] < 1e-6
    assert [r.bytes_after for r in reports] == [2 * (C + 2 * 4) * 4 for C in (8, 16, 24, 32)]
    assert {r.bytes_before for r in reports} == {2 * 2 * 20 * 4}


@pytest.mark.parametrize("magnitude", [1.0, 1.3])
def test_pairs_that_hardly_turn_may_lose_their_rotation(magnitude: float) -> None:
    """Nor do they lose the gain of turned channels (YaRN's attention factor) with it."""
    base = tiny(**SIZES).config
    still = Frequencies(values=(1.0, 0.3, 0.0, 0.0, 0.0))
    rotary = RotaryConfig(dims=10, scaling=still, magnitude=magnitude)
    layers = tuple(dataclasses.replace(layer, rotary=rotary) for layer in base.layers)
    lm = tiny_lm(dataclasses.replace(base, layers=layers), scale=1.5)
    latent, _ = to_latent(lm, 2 * (10 + 6), rope_dim=4)
    np.testing.assert_allclose(latent.logits(TOKENS), lm.logits(TOKENS), atol=TINY_LOGITS)


def test_errors_are_those_of_what_is_saved() -> None:
    """A full latent in bf16 has the rounding of bf16, and the report says so."""
    lm = tiny_lm(dtype="bfloat16", num_layers=1)
    _, report = to_latent(lm, latent_dim=32)
    assert 1e-4 < report.layers[0].values < 1e-2


def test_repeated_heads_are_exact_and_pooled_ones_are_means() -> None:
    lm = tiny(**SIZES)
    wide, report = to_grouped(lm, 6)
    np.testing.assert_allclose(wide.logits(TOKENS), lm.logits(TOKENS), atol=TINY_LOGITS)
    assert (report.bytes_after, report.layers[0].keys) == (3 * report.bytes_before, 0)
    one, report = to_grouped(lm, 1)
    k = kernel(lm, 1, "qkv")[60:80].reshape(2, 10, 60)
    np.testing.assert_allclose(kernel(one, 1, "qkv")[60:70], k.mean(0), atol=1e-6)
    error = np.linalg.norm(k - k.mean(0)) / np.linalg.norm(k)
    assert report.layers[1].keys == pytest.approx(error, rel=1e-5)
    # A model whose heads are alike loses nothing when they are pooled again.
    back, report = to_grouped(wide, 2)
    np.testing.assert_allclose(back.logits(TOKENS), lm.logits(TOKENS), atol=TINY_LOGITS)
    assert report.layers[0].values < 1e-6


@pytest.mark.parametrize(
    ("convert", "words"),
    [
        (lambda lm: to_latent(lm, 33, 4), "latent_dim=33.*1 to 32"),
        (lambda lm: to_latent(lm, 8, 3), "rope_dim=3.*even number from 2 to 10"),
        (lambda lm: to_latent(to_latent(lm, 8)[0], 4), "caches latents already"),
        (lambda lm: to_grouped(lm, 4), "num_kv_heads=4 neither divides"),
        (lambda lm: to_grouped(lm, 0), "num_kv_heads=0"),
    ],
    ids=["too wide", "odd", "twice", "indivisible", "none"],
)
def test_what_cannot_be_converted_is_refused(convert, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        convert(tiny(**SIZES))


def test_attention_that_latents_cannot_express_is_refused() -> None:
    base = tiny(**SIZES).config
    for change in ({"bias": True}, {"qk_norm": "head"}, {"softcap": 5.0}, {"sink_logits": True}):
        attention = dataclasses.replace(base.attention, **change)
        assert isinstance(attention, AttentionConfig)
        lm = tiny_lm(dataclasses.replace(base, attention=attention))
        with pytest.raises(ConfigError):
            to_latent(lm, 8)
