"""The two forms of latent attention, and DeepSeek's own model through latent caches."""

import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import CacheConfig, Codecs, Int, Paged, Window
from kvjax.cache.entries import LatentQuery, Sight
from kvjax.cache.entries.latent import KIND
from pallas_kernels._common.operand import Operand
from pallas_kernels._common.visibility import causal
from tests.fixtures.families import MODELS

ABSORBED = 1e-5  # both forms are f32 sums of the same products in other orders


def test_absorbed_is_expanded() -> None:
    rng = np.random.default_rng(0)
    B, T, N, C, R, H, V = 2, 33, 5, 24, 6, 14, 9

    def draw(*shape: int) -> jnp.ndarray:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    query = LatentQuery(
        nope=draw(B, T, N, H),
        rope=draw(B, T, N, R),
        key_up=draw(N, H, C) / C**0.5,
        value_up=draw(N, V, C) / C**0.5,
    )
    operands = [Operand.raw(draw(B, T, width)) for width in (C, R)]
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    sight = Sight(
        visibility=causal(positions, window=20),
        key_positions=positions,
        page_table=None,
        scale=None,
        softcap=None,
        bases=(None, None),
        widths=(C, R),
    )
    assert KIND.attend_fresh is not None
    absorbed, expanded = (
        KIND.attend(query, operands, sight),
        KIND.attend_fresh(query, operands, sight),
    )
    for x, y in zip(absorbed, expanded, strict=True):
        np.testing.assert_allclose(x, y, atol=ABSORBED, rtol=0)
    # The scale is that of the heads before they were absorbed, (H + R) ** -0.5.
    scaled = KIND.attend(query, operands, Sight(**{**vars(sight), "scale": (H + R) ** -0.5}))
    np.testing.assert_array_equal(scaled[0], absorbed[0])


def test_deepseek_through_latent_caches() -> None:
    lm = kvjax.load(MODELS / "deepseek_v3")
    latent = lm.config.attention
    C, R, L, S = latent.latent_dim, latent.rope_dim, lm.config.num_layers, 48
    prompt = np.random.default_rng(1).integers(1, lm.config.vocab_size, 40).tolist()
    exact = lm.log_likelihood(prompt, CacheConfig(), chunk=40)
    for cache in (CacheConfig(layout=Paged(page_size=16)), CacheConfig(policy=Window(window=64))):
        assert cache.init(lm.dims, 1, S).nbytes().payload == L * S * (C + R) * 4
        np.testing.assert_allclose(lm.log_likelihood(prompt, cache, 40), exact, atol=2e-4)
    int8 = CacheConfig(codec=Codecs(c=Int(bits=8), k_rope=Int(bits=8)))
    difference = np.abs(lm.log_likelihood(prompt, int8, 40) - exact)
    # Here and there a token takes another expert; most hardly notice.
    assert 0 < np.median(difference) < 0.1
    assert int8.predict_nbytes(lm.dims, 1, S).payload == L * S * (C + R)
    assert len(lm.generate(prompt, int8, max_new_tokens=6, stop=[]).tokens[0]) == 6
