"""Attribution against what a cache really gives, layer by layer and head by head."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import KIVI, CacheConfig, Hadamard, Int, Paged, SinkWindow, Window
from kvjax.cache.entries import KV
from kvjax.errors import ConfigError
from kvjax.evaluation.attribution import _capture, attribute
from kvjax.nn.config import LatentAttentionConfig
from kvjax.nn.rotary import Rotary
from kvjax.testing.tiny import tiny_lm
from tests.models import tiny

TEXT = np.random.default_rng(0).integers(0, 97, 150)
SIZES = dict(num_heads=6, num_kv_heads=2, head_dim=10, d_model=36)
CACHES = {
    "int4": CacheConfig(codec=Int(bits=4, group_size=5)),
    "unrotated": CacheConfig(codec=Int(bits=4, group_size=5), positions="unrotated_absolute"),
    "kivi": CacheConfig(layout=Paged(page_size=8), codec=KIVI(bits=2, group_size=8, residual=9)),
    "hadamard": CacheConfig(codec=Hadamard(bits=2)),
    "window": CacheConfig(policy=Window(window=20)),
    "int4, sinks": CacheConfig(
        codec=Int(bits=4, group_size=5), policy=SinkWindow(sinks=2, window=20)
    ),
}


def outputs(lm, layer: int, cache: CacheConfig) -> np.ndarray:
    """Attention outputs [T, N, H] of one layer's own queries, decoded through a real cache."""
    q, k, v = _capture(lm, jnp.asarray(TEXT, jnp.int32)[None])[layer]
    rotary = Rotary.of(lm.config.layers[layer].rotary)
    dims = dataclasses.replace(lm.dims, num_layers=1)

    @jax.jit
    def run(q, k, v):
        def step(state, x):
            q, k, v = (y[None, None] for y in x)
            at = state.lengths[:, None]
            output, state = state.attend(0, q, KV(k, v), at, rotary=rotary)
            return state.advance(jnp.ones(1, jnp.int32)), output[0, 0]

        return jax.lax.scan(step, cache.init(dims, 1, len(TEXT)), (q, k, v))[1]

    return np.asarray(run(q, k, v), np.float64)


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_the_joint_error_is_that_of_the_cache(cache) -> None:
    lm, start = tiny(**SIZES), 3
    found = attribute(lm, TEXT, cache, start=start)
    for layer in range(2):
        exact, got = (outputs(lm, layer, c)[start:] for c in (CacheConfig(), cache))
        error = np.sqrt(np.square(got - exact).sum((0, 2)) / np.square(exact).sum((0, 2)))
        np.testing.assert_allclose(found.mix[layer], error, rtol=2e-3)


def test_codec_and_eviction_are_told_apart() -> None:
    lm = tiny(**SIZES)
    codec = attribute(lm, TEXT, CACHES["int4"])
    window = attribute(lm, TEXT, CACHES["window"])
    both = attribute(lm, TEXT, CACHES["int4, sinks"])
    assert (codec.lost_mass == 0).all() and (codec.mix_eviction == 0).all()
    np.testing.assert_allclose(codec.mix_codec, codec.mix, rtol=1e-5)
    assert (window.mix_codec == 0).all() and (window.keys == 0).all()
    np.testing.assert_allclose(window.mix_eviction, window.mix, rtol=1e-5)
    assert (both.lost_mass < window.lost_mass + 1e-6).all()  # sinks take some of it back
    assert (both.mix_eviction > 0).all() and (both.mix_codec > 0).all()
    # With scores far from uniform the codec's keys disturb, its values disturb, both together.
    assert (codec.mix_keys > 0).all() and (codec.mix_values > 0).all()
    assert (codec.total_variation > 0).all() and (codec.total_variation < 1).all()


def test_an_exact_cache_loses_nothing() -> None:
    found = attribute(tiny(**SIZES), TEXT, CacheConfig(layout=Paged(page_size=4)))
    assert all(np.abs(x).max() < 1e-6 for x in vars(found).values())
    assert found.by_layer()["mix"].shape == (2,)


def test_lost_mass_is_the_softmax_outside_the_window() -> None:
    """A model whose scores are all 0 spreads its weight evenly: n - w of n tokens are lost."""
    lm = tiny_lm(scale=0.0)
    n = 40
    found = attribute(lm, TEXT[:n], CacheConfig(policy=Window(window=10)), start=0)
    expected = np.mean([max(p + 1 - 10, 0) / (p + 1) for p in range(n)])
    np.testing.assert_allclose(found.lost_mass, expected, rtol=1e-5)


def test_what_it_cannot_attribute_is_refused() -> None:
    slots = CacheConfig(policy=SinkWindow(sinks=2, window=9), positions="unrotated_slot")
    with pytest.raises(ConfigError, match="relative to the cache"):
        attribute(tiny(**SIZES), TEXT, slots)
    with pytest.raises(ConfigError, match="one text"):
        attribute(tiny(**SIZES), TEXT[:4], CacheConfig(), start=4)
    config = tiny(**SIZES).config
    latent = LatentAttentionConfig(num_heads=2, latent_dim=8, rope_dim=10, nope_dim=4, value_dim=4)
    lm = tiny_lm(dataclasses.replace(config, attention=latent))
    with pytest.raises(ConfigError, match="latents"):
        attribute(lm, TEXT, CacheConfig())
