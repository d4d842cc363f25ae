"""SmolLM3: every fourth layer leaves queries and keys unturned (NoPE)."""

from kvjax.checkpoints.families.base import (
    Family,
    read_attention,
    read_decoder,
    read_mlp,
    read_sliding,
)
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.rope import read_rope
from kvjax.nn.config import LayerConfig, TransformerConfig


def _config(raw: RawConfig) -> TransformerConfig:
    bias = raw.flag("attention_bias", False)
    attention = read_attention(raw, bias=bias, out_bias=bias)
    rope = read_rope(raw, attention.head_dim, theta=2e6, max_len=32_768)
    mlp = read_mlp(raw, bias=raw.flag("mlp_bias", False))
    interval = raw.integer("no_rope_layer_interval", 4)
    # Despite its name the list holds 1 for layers that are turned.
    turned = raw.items("no_rope_layers", int, raw.num_layers)
    if turned is None:
        turned = [int((i + 1) % interval != 0) for i in range(raw.num_layers)]
    window = raw.integer_or_null("sliding_window", None)
    window = window if raw.flag("use_sliding_window", False) else None
    sliding = read_sliding(raw, lambda i: not turned[i])
    layers = [
        LayerConfig(
            mlp=mlp, rotary=rope.rotary if turns else None, window=window if slides else None
        )
        for turns, slides in zip(turned, sliding, strict=True)
    ]
    return read_decoder(raw, attention=attention, layers=layers, max_len=rope.max_len, tied=True)


SMOLLM3 = Family(model_type="smollm3", config=_config)
