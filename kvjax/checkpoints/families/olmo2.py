"""OLMo 2: norms after attention and MLP instead of before, and on whole projections."""

from kvjax.checkpoints.families.base import (
    Family,
    Names,
    read_attention,
    read_decoder,
    read_mlp,
)
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.rope import read_rope
from kvjax.nn.config import LayerConfig, NormConfig, TransformerConfig


def _config(raw: RawConfig) -> TransformerConfig:
    bias = raw.flag("attention_bias", False)
    attention = read_attention(raw, bias=bias, out_bias=bias, qk_norm="projection")
    rope = read_rope(raw, attention.head_dim, max_len=2048)
    layer = LayerConfig(mlp=read_mlp(raw), rotary=rope.rotary)
    return read_decoder(
        raw,
        attention=attention,
        layers=[layer] * raw.num_layers,
        max_len=rope.max_len,
        norm_eps=1e-5,
        norm=NormConfig(before=False, after=True),
    )


OLMO2 = Family(
    model_type="olmo2",
    config=_config,
    names=Names(
        attention_post_norm="post_attention_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
)
