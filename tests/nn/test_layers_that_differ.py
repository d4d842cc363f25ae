"""Layers with windows, without positions, with another's keys, with experts: cached is uncached."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import CacheConfig, Codecs, Int, LayerPattern, Paged, SinkWindow
from kvjax.errors import ConfigError
from kvjax.evaluation import effective_bits
from kvjax.nn.config import (
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    RouterConfig,
    TransformerConfig,
)
from kvjax.nn.moe import MixtureOfExperts, route
from kvjax.nn.rotary import RotaryConfig
from kvjax.testing.tiny import tiny_lm
from tests.tolerances import TINY_LOGITS

TOKENS = np.random.default_rng(1).integers(0, 97, (2, 29))
MLP = MLPConfig(d_ff=32)
ROTARY = RotaryConfig(dims=8, theta=100.0)
BASE = TransformerConfig.llama(
    vocab_size=97, num_layers=4, d_model=36, num_heads=6, num_kv_heads=2, head_dim=8, d_ff=32,
    max_len=128,
)  # fmt: skip


def with_layers(*layers: LayerConfig, **changes) -> TransformerConfig:
    return dataclasses.replace(BASE, layers=layers, **changes)


# Layers 2 and 3 read the stores of 0 (all keys) and 1 (a window).
SHARED = with_layers(
    LayerConfig(mlp=MLP, rotary=ROTARY),
    LayerConfig(mlp=MLP, rotary=ROTARY, window=7),
    LayerConfig(mlp=MLP, rotary=ROTARY, reads=0),
    LayerConfig(mlp=MLP, rotary=ROTARY, window=7, reads=1),
)
LATENT = with_layers(
    LayerConfig(mlp=MLP, rotary=RotaryConfig(dims=4)),
    LayerConfig(mlp=MLP, rotary=RotaryConfig(dims=4), window=7),
    attention=LatentAttentionConfig(
        num_heads=5, latent_dim=14, rope_dim=4, nope_dim=7, value_dim=6, query_dim=9
    ),
)
CACHES = {
    "contiguous": CacheConfig(),
    "paged": CacheConfig(layout=Paged(page_size=4), positions="unrotated_absolute"),
    "slack": CacheConfig(slack=3),
}


@pytest.mark.parametrize(
    ("config", "cache"),
    [(SHARED, "contiguous"), (SHARED, "paged"), (SHARED, "slack"), (LATENT, "paged")],
    ids=["shared", "shared-paged", "shared-slack", "latent-paged"],
)
def test_every_chunking_gives_the_uncached_logits(config, cache) -> None:
    lm, cache = tiny_lm(config, scale=1.5), CACHES[cache]
    expected = np.asarray(lm.logits(TOKENS))
    for chunk in (11, 1):
        pieces = [logits for _, logits in lm.teacher_forced(TOKENS, cache, chunk)]
        np.testing.assert_allclose(np.concatenate(pieces, 1), expected, atol=TINY_LOGITS)


def test_a_lossy_tail_is_shared_exactly() -> None:
    """Codes and tail of a shared store are the same for all its readers, in any chunking."""
    lm = tiny_lm(SHARED, scale=1.5)
    cache = CacheConfig(codec=Int(bits=8, axis="channel", group_size=4, scale_dtype="float32"))
    runs = [
        np.concatenate([logits for _, logits in lm.teacher_forced(TOKENS, cache, chunk)], 1)
        for chunk in (11, 1)
    ]
    np.testing.assert_allclose(runs[1], runs[0], atol=2e-3)  # codes may flip


def test_bytes_follow_the_map_and_the_windows() -> None:
    own = dataclasses.replace(
        SHARED, layers=tuple(dataclasses.replace(layer, reads=None) for layer in SHARED.layers)
    )
    shared, alone = (
        CacheConfig().predict_nbytes(config.cache_dims("float32"), 1, 64).payload
        for config in (SHARED, own)
    )
    token = 2 * (8 + 8) * 4
    assert (shared, alone) == ((64 + 7) * token, 2 * (64 + 7) * token)
    cache = CacheConfig().init(SHARED.cache_dims("float32"), 1, 64)
    assert len(cache.stores) == 2
    assert effective_bits(CacheConfig(), SHARED.cache_dims("float32")) == 32


def test_latent_bytes_are_those_of_c_and_k_rope() -> None:
    config = dataclasses.replace(LATENT, layers=LATENT.layers[:1] * 3)
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        dims = config.cache_dims(dtype)
        cache = CacheConfig().init(dims, batch=2, max_len=50)
        assert cache.nbytes().payload == 2 * 3 * 50 * (14 + 4) * itemsize
        pages = CacheConfig(layout=Paged(page_size=16)).predict_nbytes(dims, 2, 50)
        assert pages.payload == cache.nbytes().payload
        assert pages.padding == 2 * 3 * 14 * (14 + 4) * itemsize
    mixed = CacheConfig(codec=Codecs(c=Int(bits=8, group_size=7)))
    report = mixed.predict_nbytes(config.cache_dims("float32"), 1, 50)
    assert report.payload == 3 * 50 * (14 + 4 * 4)


def test_codecs_of_fields_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="chosen for k, but this model caches c and k_rope"):
        CacheConfig(codec=Codecs(k=Int(bits=4))).init(LATENT.cache_dims("float32"), 1, 8)


def test_a_reader_has_the_cache_of_its_owner() -> None:
    pattern = LayerPattern(CacheConfig(), {2: CacheConfig(codec=Int(bits=4))})
    with pytest.raises(ConfigError, match="layer 2 reads the store of layer 0"):
        pattern.init(SHARED.cache_dims("float32"), 1, 8)


def test_a_cache_of_another_model_is_refused() -> None:
    lm = tiny_lm(SHARED)
    dims = dataclasses.replace(lm.dims, windows=())
    cache = CacheConfig().init(dims, 1, 8)
    zero = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ConfigError, match="layer 1 has window 7"):
        lm.model.apply(lm.params, zero, zero, cache)


def test_sinks_outside_the_models_window_are_not_seen() -> None:
    """A policy may show less than the model, never more."""
    layers = [LayerConfig(mlp=MLP, rotary=ROTARY, window=20)]
    lm = tiny_lm(with_layers(*layers), scale=1.5)
    sinks = CacheConfig(policy=SinkWindow(sinks=2, window=8))
    before = np.concatenate([x for _, x in lm.teacher_forced(TOKENS, sinks, 1)], 1)
    other = TOKENS.copy()
    other[:, 0] = (other[:, 0] + 1) % 97  # a sink, out of the window from position 20 on
    after = np.concatenate([x for _, x in lm.teacher_forced(other, sinks, 1)], 1)
    assert np.abs(after - before)[:, 10:20].max() > 1e-3
    np.testing.assert_array_equal(after[:, 20:], before[:, 20:])


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ((LayerConfig(mlp=MLP, reads=0),), "layer 0 reads"),
        (
            (
                LayerConfig(mlp=MLP),
                LayerConfig(mlp=MLP, reads=0),
                LayerConfig(mlp=MLP, reads=1),
            ),
            "layer 2 reads",
        ),
        ((LayerConfig(mlp=MLP), LayerConfig(mlp=MLP, window=4, reads=0)), "window 4"),
        ((LayerConfig(mlp=MLP), LayerConfig(mlp=MLP, rotary=ROTARY, reads=0)), "rotary"),
        ((LayerConfig(mlp=MLP, rotary=RotaryConfig(dims=10)),), "turns 10 channels of 8"),
    ],
    ids=["itself", "reader", "window", "rotary", "too wide"],
)
def test_impossible_layers_are_refused(layers, words) -> None:
    with pytest.raises(ConfigError, match=words):
        with_layers(*layers)


def dense_moe(params, x: np.ndarray, config: MoEConfig) -> np.ndarray:
    """Every expert on every row, in float64, mixed by the router's weights."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params["params"])
    logits = x @ p["router"]["kernel"]
    chosen, weights = route(
        jnp.asarray(logits, jnp.float32), config.router, config.experts_per_token
    )
    out = np.zeros_like(x)
    for row in range(len(x)):
        for expert, weight in zip(np.asarray(chosen)[row], np.asarray(weights)[row], strict=True):
            gate, up = np.split(x[row] @ p["gate_up"][expert], 2)
            out[row] += weight * ((gate / (1 + np.exp(-gate)) * up) @ p["down"][expert])
    return out


def test_experts_are_those_of_a_dense_sum() -> None:
    config = MoEConfig(num_experts=7, experts_per_token=3, d_ff=10)
    x = np.random.default_rng(2).standard_normal((13, 12)).astype(np.float32)
    module = MixtureOfExperts(config)
    params = module.init(jax.random.key(0), jnp.asarray(x))
    got = module.apply(params, jnp.asarray(x))
    np.testing.assert_allclose(got, dense_moe(params, x.astype(np.float64), config), atol=1e-5)


def test_groups_limit_the_choice_and_a_bias_only_the_choice() -> None:
    logits = jnp.array([[5.0, 0.0, 4.0, 4.0, 1.0, 1.0]])
    best = RouterConfig(num_groups=3, groups_per_token=1, group_score="max")
    assert route(logits, best, 2)[0].tolist() == [[0, 1]]
    both = dataclasses.replace(best, group_score="top2", score="sigmoid")
    assert sorted(route(logits, both, 2)[0][0].tolist()) == [2, 3]
    bias = jnp.array([0.0, 0.0, 0.0, 0.0, 9.0, 9.0])
    chosen, weights = route(logits, both, 2, bias)
    assert sorted(chosen[0].tolist()) == [4, 5]
    np.testing.assert_allclose(weights, [[0.5, 0.5]], atol=1e-6)
