"""GPT-OSS: attention sinks as logits, every other layer with a window, experts with biases.

Experts are stored as products take them, [in, out], with the columns of gate and up in turn.
Checkpoints in MXFP4 are refused; an unquantized copy is read.
"""

from collections.abc import Iterator

import numpy as np

from kvjax.checkpoints.families.base import (
    Family,
    linear,
    read_attention,
    read_decoder,
    read_sliding,
)
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.rope import read_rope
from kvjax.checkpoints.tensors import Parameter, Part
from kvjax.nn.config import LayerConfig, MoEConfig, RouterConfig, TransformerConfig

_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _config(raw: RawConfig) -> TransformerConfig:
    raw.refuse("swiglu_limit", 7.0)
    raw.refuse("swiglu_alpha", 1.702)
    bias = raw.flag("attention_bias", True)
    attention = read_attention(raw, 64, bias=bias, out_bias=bias, sink_logits=True)
    rope = read_rope(raw, attention.head_dim, theta=150_000.0, max_len=131_072, scaling=_SCALING)
    # Both keys occur, in files of different writers.
    chosen = "num_experts_per_tok" if raw.has("num_experts_per_tok") else "experts_per_token"
    experts = MoEConfig(
        num_experts=raw.num_experts("num_local_experts", 128),
        experts_per_token=raw.integer(chosen, 4),
        d_ff=raw.integer("intermediate_size"),
        activation=raw.choice("hidden_act", "silu", {"silu": "clamped_swiglu"}),
        bias=True,
        router=RouterConfig(score="softmax_chosen", bias=True, renormalize=False),
    )
    window = raw.integer_or_null("sliding_window", 128)
    layers = [
        LayerConfig(mlp=experts, rotary=rope.rotary, window=window if slides else None)
        for slides in read_sliding(raw, lambda i: i % 2 == 0)
    ]
    return read_decoder(
        raw, attention=attention, layers=layers, max_len=rope.max_len, norm_eps=1e-5
    )


def _experts(config: MoEConfig, D: int, at: str, stem: str) -> Iterator[Parameter]:
    E, F = config.num_experts, config.d_ff
    router = {f"{stem}mlp.router": E}
    yield from linear(at, "mlp", "router", names=router, width=D, bias=True)
    for key, name, shape in (
        ("gate_up", "gate_up_proj", (E, D, 2 * F)),
        ("gate_up_bias", "gate_up_proj_bias", (E, 2 * F)),
    ):
        parts = tuple(
            Part(name=f"{stem}mlp.experts.{name}", shape=shape, place=place, view=view)
            for place, view in ((np.s_[..., :F], _even), (np.s_[..., F:], _odd))
        )
        yield Parameter(path=(at, "mlp", key), shape=shape, parts=parts)
    for key, name, shape in (
        ("down", "down_proj", (E, F, D)),
        ("down_bias", "down_proj_bias", (E, D)),
    ):
        yield Parameter.whole(at, "mlp", key, name=f"{stem}mlp.experts.{name}", shape=shape)


def _even(stored: np.ndarray) -> np.ndarray:
    return stored[..., ::2]


def _odd(stored: np.ndarray) -> np.ndarray:
    return stored[..., 1::2]


GPT_OSS = Family(model_type="gpt_oss", config=_config, experts=_experts)
