"""Qwen2 and Qwen2.5: biases on queries, keys and values; a window in upper layers if asked for."""

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
    attention = read_attention(raw, bias=True)
    rope = read_rope(raw, attention.head_dim, max_len=32_768)
    mlp = read_mlp(raw)
    layers = [
        LayerConfig(mlp=mlp, rotary=rope.rotary, window=window)
        for window in read_upper_windows(raw)
    ]
    return read_decoder(raw, attention=attention, layers=layers, max_len=rope.max_len)


def read_upper_windows(raw: RawConfig) -> list[int | None]:
    """Return the windows: none but in the layers from `max_window_layers` on, if in use."""
    window = raw.integer_or_null("sliding_window", 4096)
    lowest = raw.integer("max_window_layers", 28, least=0)
    in_use = raw.flag("use_sliding_window", False)
    sliding = read_sliding(raw, lambda i: i >= lowest)
    return [window if in_use and slides else None for slides in sliding]


QWEN2 = Family(model_type="qwen2", config=_config)
