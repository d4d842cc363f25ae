"""Take a model's matrices apart and put others together, in float64 and as [out, in]."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import ConfigError
from kvjax.language_model import LanguageModel
from kvjax.nn.config import AttentionConfig, TransformerConfig
from kvjax.nn.layers import outputs_first


def plain_attention(config: TransformerConfig, what: str) -> AttentionConfig:
    """Return the grouped attention of a model, refusing what a conversion cannot carry over."""
    attention = config.attention
    if not isinstance(attention, AttentionConfig):
        raise ConfigError(f"the model caches latents already; {what} starts from keys and values")
    for name, plain in (("bias", False), ("qk_norm", "none")):
        if getattr(attention, name) != plain:
            raise ConfigError(f"{name}={getattr(attention, name)!r} is not known to {what}")
    if any(layer.reads is not None for layer in config.layers):
        raise ConfigError(f"layers that read another's keys are not known to {what}")
    return attention


def projections(lm: LanguageModel, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries [N, H, D], keys [K, H, D] and values [K, H, D] of a layer."""
    attention = lm.config.attention
    assert isinstance(attention, AttentionConfig)
    N, K, H = attention.num_heads, attention.num_kv_heads, attention.head_dim
    kernel = np.asarray(lm.params["params"][f"layers_{layer}"]["attention"]["qkv"]["kernel"])
    rows = kernel.astype(np.float64)
    rows = rows if outputs_first(kernel.dtype) else rows.T
    heads = rows.reshape(N + 2 * K, H, -1)
    return heads[:N], heads[N : N + K], heads[N + K :]


def kernel(rows: np.ndarray, dtype: str) -> jax.Array:
    """A matrix [out, in] as the model stores it."""
    return jnp.asarray(rows if outputs_first(dtype) else rows.T, dtype)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """What is left of f64 `x` once it is stored in `dtype`: errors are those of the saved model."""
    return x.astype(jnp.dtype(dtype)).astype(np.float64)


def replace_attention(
    lm: LanguageModel, config: TransformerConfig, attentions: list[dict[str, Any]], name: str
) -> LanguageModel:
    """A model with other attention parameters in every layer; the rest is shared."""
    params = dict(lm.params["params"])
    for i, attention in enumerate(attentions):
        params[f"layers_{i}"] = {**params[f"layers_{i}"], "attention": attention}
    return LanguageModel(
        model=type(lm.model)(config, dtype=lm.model.dtype),
        params={"params": params},
        config=config,
        tokenizer=lm.tokenizer,
        name=name,
        eos_ids=lm.eos_ids,
    )


def attention_inputs(lm: LanguageModel, tokens: np.ndarray) -> list[np.ndarray]:
    """What each layer's attention is given on a text: f64[tokens, D] a layer."""
    if not lm.config.norm.before:
        raise ConfigError("calibration needs a model that normalises before attention")
    batch = jnp.asarray(np.atleast_2d(tokens), jnp.int32)
    B, T = batch.shape
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))

    @jax.jit
    def run(params):
        _, state = lm.model.apply(
            params,
            batch,
            positions,
            capture_intermediates=lambda module, _: module.name == "attention_norm",
            mutable=["intermediates"],
        )
        return state["intermediates"]

    captured = run(lm.params)
    return [
        np.asarray(captured[f"layers_{i}"]["attention_norm"]["__call__"][0], np.float64).reshape(
            B * T, -1
        )
        for i in range(lm.config.num_layers)
    ]


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want|, Frobenius."""
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-300))
