"""Llama 2 and 3.x, SmolLM2, and whoever saves under the same model_type."""

from kvjax.checkpoints.families.base import Family, read_attention, read_decoder, read_mlp
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.rope import read_rope
from kvjax.nn.config import LayerConfig, TransformerConfig


def _config(raw: RawConfig) -> TransformerConfig:
    bias = raw.flag("attention_bias", False)
    attention = read_attention(raw, bias=bias, out_bias=bias)
    rope = read_rope(raw, attention.head_dim, max_len=2048)
    layer = LayerConfig(mlp=read_mlp(raw, bias=raw.flag("mlp_bias", False)), rotary=rope.rotary)
    layers = [layer] * raw.num_layers
    return read_decoder(raw, attention=attention, layers=layers, max_len=rope.max_len)


LLAMA = Family(model_type="llama", config=_config)
