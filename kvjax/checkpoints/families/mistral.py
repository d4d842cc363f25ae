"""Mistral and Mixtral: one window for all layers, or none; Mixtral has experts."""

from kvjax.checkpoints.families.base import (
    ACTIVATIONS,
    Family,
    read_attention,
    read_decoder,
    read_mlp,
)
from kvjax.checkpoints.families.experts import SeparateExperts
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.rope import read_rope
from kvjax.nn.config import LayerConfig, MLPConfig, MoEConfig, TransformerConfig

_MAX_LEN = 131_072


def _mistral(raw: RawConfig) -> TransformerConfig:
    return _config(raw, read_mlp(raw), theta=10_000.0, window=4096, norm_eps=1e-6)


def _mixtral(raw: RawConfig) -> TransformerConfig:
    experts = MoEConfig(
        num_experts=raw.num_experts("num_local_experts", 8),
        experts_per_token=raw.integer("num_experts_per_tok", 2),
        d_ff=raw.integer("intermediate_size"),
        activation=raw.choice("hidden_act", "silu", ACTIVATIONS),
    )
    return _config(raw, experts, theta=1e6, window=None, norm_eps=1e-5)


def _config(
    raw: RawConfig, mlp: MLPConfig | MoEConfig, *, theta: float, window: int | None, norm_eps: float
) -> TransformerConfig:
    # Models that alternate (Ministral) are saved under this model_type too, but with layer_types,
    # which readers of this one pass over.
    raw.refuse("layer_types", ["full_attention"] * raw.num_layers)
    attention = read_attention(raw)
    rope = read_rope(raw, attention.head_dim, theta=theta, max_len=_MAX_LEN)
    layer = LayerConfig(
        mlp=mlp, rotary=rope.rotary, window=raw.integer_or_null("sliding_window", window)
    )
    return read_decoder(
        raw,
        attention=attention,
        layers=[layer] * raw.num_layers,
        max_len=rope.max_len,
        norm_eps=norm_eps,
    )


MISTRAL = Family(model_type="mistral", config=_mistral)
MIXTRAL = Family(
    model_type="mixtral",
    config=_mixtral,
    experts=SeparateExperts(
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{e}.w1",
        up="block_sparse_moe.experts.{e}.w3",
        down="block_sparse_moe.experts.{e}.w2",
    ),
)
