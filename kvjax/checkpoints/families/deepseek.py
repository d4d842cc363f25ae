"""DeepSeek V2 and V3: latent attention (MLA) and experts, some shared, chosen by groups.

Rotary pairs are stored interleaved; their rows are put into half-split order. What expands the
latent is one matrix in the file and two arrays here, because decoding absorbs each elsewhere.
"""

from collections.abc import Iterator

import numpy as np

from kvjax.checkpoints.families.base import (
    ACTIVATIONS,
    Family,
    linear,
    matrix,
    read_decoder,
    read_mlp,
    scale,
)
from kvjax.checkpoints.families.experts import SeparateExperts
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.rope import Rope, read_rope
from kvjax.checkpoints.tensors import Parameter, Part, half_split
from kvjax.nn.config import (
    LatentAttentionConfig,
    LayerConfig,
    MoEConfig,
    RouterConfig,
    TransformerConfig,
)


def _v2(raw: RawConfig) -> TransformerConfig:
    # The published code divides the weights by their sum where this is true, the original
    # implementation does not; no released model has it.
    raw.refuse("norm_topk_prob", False)
    raw.refuse("scoring_func", "softmax")
    groups = raw.choice("topk_method", "greedy", {"greedy": False, "group_limited_greedy": True})
    router = RouterConfig(
        score="softmax",
        renormalize=False,
        scale=raw.number("routed_scaling_factor", 1.0),
        num_groups=raw.integer("n_group") if groups else 1,
        groups_per_token=raw.integer("topk_group") if groups else 1,
        group_score="max",
    )
    return _config(raw, router, shared=2, dense=0, max_len=2048)


def _v3(raw: RawConfig) -> TransformerConfig:
    raw.refuse("rope_interleave", True)
    raw.refuse("topk_method", "noaux_tc")
    raw.refuse("scoring_func", "sigmoid")
    router = RouterConfig(
        score="sigmoid",
        choice_bias=True,
        renormalize=raw.flag("norm_topk_prob", True),
        scale=raw.number("routed_scaling_factor", 2.5),
        num_groups=raw.integer("n_group", 8),
        groups_per_token=raw.integer("topk_group", 4),
        group_score="top2",
    )
    return _config(raw, router, shared=1, dense=3, max_len=4096)


def _config(
    raw: RawConfig, router: RouterConfig, *, shared: int, dense: int, max_len: int
) -> TransformerConfig:
    raw.refuse("attention_bias", False)
    raw.refuse("mlp_bias", False)
    raw.refuse("moe_layer_freq", 1)
    # The head_dim of these files, if any, is that of the rotary key.
    rope = read_rope(raw, raw.integer("qk_rope_head_dim", 64), max_len=max_len)
    width = raw.integer("moe_intermediate_size")
    experts = MoEConfig(
        num_experts=raw.num_experts("n_routed_experts"),
        experts_per_token=raw.integer("num_experts_per_tok"),
        d_ff=width,
        shared_d_ff=width * raw.integer("n_shared_experts", shared),
        activation=raw.choice("hidden_act", "silu", ACTIVATIONS),
        router=router,
    )
    mlp = read_mlp(raw)
    first = raw.integer("first_k_dense_replace", dense, least=0)
    layers = [
        LayerConfig(mlp=mlp if i < first else experts, rotary=rope.rotary)
        for i in range(raw.num_layers)
    ]
    return read_decoder(raw, attention=_attention(raw, rope), layers=layers, max_len=rope.max_len)


def _attention(raw: RawConfig, rope: Rope) -> LatentAttentionConfig:
    nope, R = raw.integer("qk_nope_head_dim", 128), raw.integer("qk_rope_head_dim", 64)
    return LatentAttentionConfig(
        num_heads=raw.integer("num_attention_heads"),
        latent_dim=raw.integer("kv_lora_rank", 512),
        rope_dim=R,
        nope_dim=nope,
        value_dim=raw.integer("v_head_dim", 128),
        query_dim=raw.integer_or_null("q_lora_rank", 1536),
        # The norms on latents have this one, whatever rms_norm_eps says.
        norm_epsilon=1e-6,
        scale=(nope + R) ** -0.5 * rope.score_gain,
    )


def _latent(config: LatentAttentionConfig, D: int, at: str, stem: str) -> Iterator[Parameter]:
    N, C, R, Q = config.num_heads, config.latent_dim, config.rope_dim, config.query_dim
    nope, Hv = config.nope_dim, config.value_dim
    own, stem = (at, "attention"), f"{stem}self_attn."
    turn_query, turn_key = half_split(N, nope, R), half_split(1, C, R)

    def turned(*path: str, name: str, rows: int, width: int, view) -> Parameter:
        names = {f"{stem}{name}.weight": rows}
        return Parameter.rows(*own, *path, "kernel", names=names, width=(width,), view=view)

    query = N * (nope + R)
    if Q is None:
        yield turned("query", name="q_proj", rows=query, width=D, view=turn_query)
    else:
        yield matrix(*own, "query_down", names={f"{stem}q_a_proj.weight": Q}, width=D)
        yield scale(*own, "query_norm", name=f"{stem}q_a_layernorm", size=Q)
        yield turned("query_up", name="q_b_proj", rows=query, width=Q, view=turn_query)
    yield turned("latent", name="kv_a_proj_with_mqa", rows=C + R, width=D, view=turn_key)
    yield scale(*own, "latent_norm", name=f"{stem}kv_a_layernorm", size=C)

    def of_heads(key: str, rows: slice, height: int) -> Parameter:
        part = Part(
            name=f"{stem}kv_b_proj.weight",
            shape=(N * (nope + Hv), C),
            view=lambda stored: np.reshape(stored, (N, nope + Hv, C))[:, rows],
        )
        return Parameter(path=(*own, key), shape=(N, height, C), parts=(part,))

    yield of_heads("key_up", slice(nope), nope)
    yield of_heads("value_up", slice(nope, nope + Hv), Hv)
    yield from linear(*own, "out", names={f"{stem}o_proj": D}, width=N * Hv)


def _predicting_further(raw: RawConfig) -> str:
    """Layers behind the last one, which predict tokens further ahead."""
    L, further = raw.num_layers, raw.integer("num_nextn_predict_layers", 1, least=0, most=64)
    numbers = "|".join(str(L + i) for i in range(further))
    return rf"model\.layers\.({numbers})\."


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2", config=_v2, latent=_latent, experts=SeparateExperts()
)
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    config=_v3,
    latent=_latent,
    experts=SeparateExperts(),
    ignored=_predicting_further,
)
