"""Phi-3, Phi-3.5 and Phi-4-mini: fused projections, LongRoPE, heads that are turned in part."""

from kvjax.checkpoints.families.base import (
    Family,
    Names,
    read_attention,
    read_decoder,
    read_mlp,
)
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.rope import read_rope
from kvjax.nn.config import LayerConfig, TransformerConfig


def _config(raw: RawConfig) -> TransformerConfig:
    raw.refuse("attention_bias", False)
    attention = read_attention(raw)
    rope = read_rope(raw, attention.head_dim, max_len=4096, partial=True)
    window = raw.integer_or_null("sliding_window", None)
    layer = LayerConfig(mlp=read_mlp(raw), rotary=rope.rotary, window=window)
    return read_decoder(
        raw,
        attention=attention,
        layers=[layer] * raw.num_layers,
        max_len=rope.max_len,
        norm_eps=1e-5,
    )


PHI3 = Family(
    model_type="phi3",
    config=_config,
    names=Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
)
