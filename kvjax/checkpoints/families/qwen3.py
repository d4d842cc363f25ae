"""Qwen3, dense and with experts: norms on the queries and keys of each head."""

from kvjax.checkpoints.families.base import (
    ACTIVATIONS,
    Family,
    read_attention,
    read_decoder,
    read_mlp,
)
from kvjax.checkpoints.families.experts import SeparateExperts
from kvjax.checkpoints.families.qwen2 import read_upper_windows
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.rope import read_rope
from kvjax.nn.config import AttentionConfig, LayerConfig, MoEConfig, RouterConfig, TransformerConfig

_MAX_LEN = 32_768


def _dense(raw: RawConfig) -> TransformerConfig:
    attention = _attention(raw, head_dim=128)
    rope = read_rope(raw, attention.head_dim, max_len=_MAX_LEN)
    mlp = read_mlp(raw)
    layers = [
        LayerConfig(mlp=mlp, rotary=rope.rotary, window=window)
        for window in read_upper_windows(raw)
    ]
    return read_decoder(raw, attention=attention, layers=layers, max_len=rope.max_len)


def _experts(raw: RawConfig) -> TransformerConfig:
    attention = _attention(raw, head_dim=None)
    rope = read_rope(raw, attention.head_dim, max_len=_MAX_LEN)
    experts = MoEConfig(
        num_experts=raw.num_experts(
            "num_local_experts" if raw.has("num_local_experts") else "num_experts"
        ),
        experts_per_token=raw.integer("num_experts_per_tok", 8),
        d_ff=raw.integer("moe_intermediate_size"),
        activation=raw.choice("hidden_act", "silu", ACTIVATIONS),
        router=RouterConfig(renormalize=raw.flag("norm_topk_prob", False)),
    )
    step = raw.integer("decoder_sparse_step", 1)
    dense = raw.items("mlp_only_layers", int) or ()
    # This model has one window for all its layers.
    window = raw.integer_or_null("sliding_window", 4096)
    window = window if raw.flag("use_sliding_window", False) else None
    layers = [
        LayerConfig(
            mlp=read_mlp(raw) if i in dense or (i + 1) % step else experts,
            rotary=rope.rotary,
            window=window,
        )
        for i in range(raw.num_layers)
    ]
    return read_decoder(raw, attention=attention, layers=layers, max_len=rope.max_len)


def _attention(raw: RawConfig, head_dim: int | None) -> AttentionConfig:
    bias = raw.flag("attention_bias", False)
    return read_attention(raw, head_dim, qk_norm="head", bias=bias, out_bias=bias)


QWEN3 = Family(model_type="qwen3", config=_dense)
QWEN3_MOE = Family(model_type="qwen3_moe", config=_experts, experts=SeparateExperts())
