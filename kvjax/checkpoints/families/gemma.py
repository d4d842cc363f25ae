"""Gemma 2 and 3: norms before and after, a scaled embedding, windows in most layers.

Gemma 2 has soft caps; Gemma 3 has norms on queries and keys and a rotary base of its own in
layers with a window. Of a Gemma 3 with images the text model is read.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from kvjax.checkpoints.families.base import (
    Family,
    Names,
    read_attention,
    read_decoder,
    read_mlp,
    read_sliding,
)
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.rope import read_rope, read_rope_of_layer_type
from kvjax.nn.config import AttentionConfig, LayerConfig, NormConfig, TransformerConfig

_NAMES = Names(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def _gemma2(raw: RawConfig) -> TransformerConfig:
    attention = _attention(raw, softcap=_softcap(raw, "attn_logit_softcapping", 50.0))
    rope = read_rope(raw, attention.head_dim, max_len=8192)
    window = raw.integer_or_null("sliding_window", 4096)
    mlp = _mlp(raw)
    layers = [
        LayerConfig(mlp=mlp, rotary=rope.rotary, window=window if slides else None)
        for slides in read_sliding(raw, lambda i: i % 2 == 0)
    ]
    softcap = _softcap(raw, "final_logit_softcapping", 30.0)
    return _decoder(raw, attention, layers, rope.max_len, logit_softcap=softcap)


def _gemma3(raw: RawConfig) -> TransformerConfig:
    # The original implementation passes over this cap; no released model has it.
    raw.refuse("attn_logit_softcapping")
    attention = _attention(raw, qk_norm="head")
    full = read_rope_of_layer_type(
        raw,
        attention.head_dim,
        "full_attention",
        theta_key="rope_theta",
        theta=1e6,
        max_len=131_072,
        scaled=True,
    )
    local = read_rope_of_layer_type(
        raw,
        attention.head_dim,
        "sliding_attention",
        theta_key="rope_local_base_freq",
        theta=1e4,
        max_len=131_072,
    )
    every = raw.integer("sliding_window_pattern", 6)
    window = raw.integer_or_null("sliding_window", 4096)
    mlp = _mlp(raw)
    kinds = {
        True: LayerConfig(mlp=mlp, rotary=local.rotary, window=window),
        False: LayerConfig(mlp=mlp, rotary=full.rotary),
    }
    layers = [kinds[slides] for slides in read_sliding(raw, lambda i: (i + 1) % every != 0)]
    softcap = _softcap(raw, "final_logit_softcapping", None)
    return _decoder(raw, attention, layers, min(full.max_len, local.max_len), logit_softcap=softcap)


def _gemma3_with_images(raw: RawConfig) -> TransformerConfig:
    text = raw.nested("text_config")
    if text is None:
        raise raw.error("the key text_config is missing")
    # What the files of Google leave out.
    sizes = {"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4}
    stated = {key: value for key, value in text.values.items() if value is not None}
    return _gemma3(RawConfig(sizes | stated, raw.source, raw.context_len))


def _attention(raw: RawConfig, **more: Any) -> AttentionConfig:
    raw.refuse("use_bidirectional_attention", False)
    bias = raw.flag("attention_bias", False)
    scale = raw.number("query_pre_attn_scalar", 256.0) ** -0.5
    return read_attention(raw, 256, bias=bias, out_bias=bias, scale=scale, **more)


def _mlp(raw: RawConfig) -> Any:
    # Files of the first days have hidden_act beside it, which the models never used.
    if not raw.has("hidden_activation"):
        raw = RawConfig({**raw.values, "hidden_activation": "gelu_pytorch_tanh"}, raw.source)
    return read_mlp(raw, "hidden_activation")


def _softcap(raw: RawConfig, key: str, default: float | None) -> float | None:
    """Null turns a cap off; only absence is the default."""
    return None if key in raw.values and not raw.has(key) else raw.number(key, default)


def _decoder(
    raw: RawConfig,
    attention: AttentionConfig,
    layers: Sequence[LayerConfig],
    max_len: int,
    **more: Any,
) -> TransformerConfig:
    return read_decoder(
        raw,
        attention=attention,
        layers=layers,
        max_len=max_len,
        tied=True,
        norm=NormConfig(offset=True, before=True, after=True),
        embedding_scale=math.sqrt(raw.integer("hidden_size")),
        **more,
    )


GEMMA2 = Family(model_type="gemma2", config=_gemma2, names=_NAMES)
GEMMA3_TEXT = Family(model_type="gemma3_text", config=_gemma3, names=_NAMES)
GEMMA3 = Family(
    model_type="gemma3",
    config=_gemma3_with_images,
    names=dataclasses.replace(_NAMES, stem="language_model.model."),
    ignored=lambda raw: r"vision_tower\.|multi_modal_projector\.",
)
