"""What a family is, and what most families share: Llama's names, sizes and kinds of layers.

The parameters follow from the config (a bias is there iff the config says so), so a family that
keeps to Llama's names adds nothing but its config map.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.tensors import Parameter
from kvjax.nn.config import (
    AttentionConfig,
    LatentAttentionConfig,
    LayerConfig,
    MLPConfig,
    MoEConfig,
    NormConfig,
    TransformerConfig,
)

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

AttentionParameters = Callable[[Any, int, str, str], Iterator[Parameter]]
ExpertParameters = Callable[[MoEConfig, int, str, str], Iterator[Parameter]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """How a family names its tensors, less ".weight" and ".bias".

    Attributes:
      stem: In front of all but the head.
      attention_norm: Before attention.
      attention_post_norm: After it.
      mlp_norm: Before the MLP.
      mlp_post_norm: After it.
      qkv: Projections whose rows are queries, keys and values, in one tensor or three.
      out: Output projection.
      sinks: Logits of attention sinks (without ".weight").
      gate_up: Matrices whose rows are gate and up, in one tensor or two.
      down: Matrix back.
    """

    stem: str = "model."
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"

    @property
    def embedding(self) -> str:
        """The table of embeddings."""
        return f"{self.stem}embed_tokens.weight"

    @property
    def head(self) -> str:
        """The output matrix of a model that is not tied."""
        return self.stem.removesuffix("model.") + "lm_head.weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of checkpoints.

    Attributes:
      model_type: As config.json has it.
      config: From config.json to the sizes of the model.
      names: Of the tensors.
      latent: Tensors of latent attention; None where the family has none.
      experts: Tensors of a mixture of experts; None where the family has none.
      ignored: Pattern of tensors that are no part of the decoder; None where there are none.
    """

    model_type: str
    config: Callable[[RawConfig], TransformerConfig]
    names: Names = Names()
    latent: AttentionParameters | None = None
    experts: ExpertParameters | None = None
    ignored: Callable[[RawConfig], str] | None = None

    def parameters(self, config: TransformerConfig) -> Iterator[Parameter]:
        """Yield what the parameter tree of `config` holds and where the file has it."""
        names, V, D = self.names, config.vocab_size, config.d_model
        yield matrix("embed", key="embedding", names={names.embedding: V}, width=D)
        norms = {
            "attention_norm": (config.norm.before, names.attention_norm),
            "attention_post_norm": (config.norm.after, names.attention_post_norm),
            "mlp_norm": (config.norm.before, names.mlp_norm),
            "mlp_post_norm": (config.norm.after, names.mlp_post_norm),
        }
        for i, layer in enumerate(config.layers):
            at, stem = f"layers_{i}", f"{names.stem}layers.{i}."
            for place, (present, name) in norms.items():
                if present:
                    yield scale(at, place, name=stem + name, size=D)
            if isinstance(config.attention, LatentAttentionConfig):
                assert self.latent is not None, self.model_type
                yield from self.latent(config.attention, D, at, stem)
            else:
                yield from self._attention(config.attention, D, at, stem)
            if isinstance(layer.mlp, MoEConfig):
                assert self.experts is not None, self.model_type
                yield from self.experts(layer.mlp, D, at, stem)
            else:
                yield from self._mlp(layer.mlp, D, at, stem)
        yield scale("norm", name=f"{names.stem}norm", size=D)
        if not config.tie_embeddings:
            yield matrix("head", names={names.head: V}, width=D)

    def _attention(
        self, config: AttentionConfig, D: int, at: str, stem: str
    ) -> Iterator[Parameter]:
        names, N, K, H = self.names, config.num_heads, config.num_kv_heads, config.head_dim
        rows = split_rows([stem + name for name in names.qkv], (N * H, K * H, K * H))
        yield from linear(at, "attention", "qkv", names=rows, width=D, bias=config.bias)
        out = {stem + names.out: D}
        yield from linear(at, "attention", "out", names=out, width=N * H, bias=config.out_bias)
        if config.qk_norm != "none":
            projection = config.qk_norm == "projection"
            for norm, heads in (("q_norm", N), ("k_norm", K)):
                size = heads * H if projection else H
                yield scale(at, "attention", norm, name=f"{stem}self_attn.{norm}", size=size)
        if config.sink_logits:
            yield Parameter.whole(
                at, "attention", "sink_logits", name=stem + names.sinks, shape=(N,)
            )

    def _mlp(self, config: MLPConfig, D: int, at: str, stem: str) -> Iterator[Parameter]:
        F = config.d_ff
        rows = split_rows([stem + name for name in self.names.gate_up], (F, F))
        yield from linear(at, "mlp", "gate_up", names=rows, width=D, bias=config.bias)
        down = {stem + self.names.down: D}
        yield from linear(at, "mlp", "down", names=down, width=F, bias=config.bias)


def split_rows(names: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """Return the rows of each tensor, which may hold all of them or one kind each."""
    return {names[0]: sum(sizes)} if len(names) == 1 else dict(zip(names, sizes, strict=True))


def matrix(*path: str, names: dict[str, int], width: int, key: str = "kernel") -> Parameter:
    """A matrix whose rows lie in one or several tensors, named in full."""
    return Parameter.rows(*path, key, names=names, width=(width,))


def linear(
    *path: str, names: dict[str, int], width: int, bias: bool = False
) -> Iterator[Parameter]:
    """A linear layer whose rows lie in one or several tensors, named less ".weight"."""
    weights = {f"{name}.weight": rows for name, rows in names.items()}
    yield matrix(*path, names=weights, width=width)
    if bias:
        biases = {f"{name}.bias": rows for name, rows in names.items()}
        yield Parameter.rows(*path, "bias", names=biases, width=())


def scale(*path: str, name: str, size: int) -> Parameter:
    """The vector of a norm, named less ".weight"."""
    return Parameter.whole(*path, "scale", name=f"{name}.weight", shape=(size,))


def read_attention(raw: RawConfig, head_dim: int | None = None, **more: Any) -> AttentionConfig:
    """Return the heads of a config.json.

    Args:
      raw: The config.
      head_dim: The family's width of a head where the file states none; None is hidden / heads.
      **more: Other fields of `AttentionConfig`.
    """
    N, D = raw.integer("num_attention_heads"), raw.integer("hidden_size")
    return AttentionConfig(
        num_heads=N,
        num_kv_heads=raw.integer("num_key_value_heads", N),
        head_dim=raw.integer("head_dim", head_dim or D // N),
        **more,
    )


def read_mlp(raw: RawConfig, key: str = "hidden_act", **more: Any) -> MLPConfig:
    """Return the dense MLP of a config.json; `key` holds the name of the activation."""
    return MLPConfig(
        d_ff=raw.integer("intermediate_size"),
        activation=raw.choice(key, "silu", ACTIVATIONS),
        **more,
    )


def read_sliding(raw: RawConfig, default: Callable[[int], bool]) -> list[bool]:
    """Return which layers have a window, from `layer_types` where the file has it.

    Args:
      raw: The config.
      default: Whether layer i has one where the file does not say.
    """
    L = raw.num_layers
    types = raw.items("layer_types", str, L)
    if types is None:
        return [default(i) for i in range(L)]
    unknown = sorted(set(types) - {"full_attention", "sliding_attention"})
    if unknown:
        raise raw.error(
            f"layer_types has {', '.join(unknown)}; known: full_attention, sliding_attention"
        )
    return [kind == "sliding_attention" for kind in types]


def read_decoder(
    raw: RawConfig,
    *,
    attention: AttentionConfig | LatentAttentionConfig,
    layers: Sequence[LayerConfig],
    max_len: int,
    norm_eps: float = 1e-6,
    tied: bool = False,
    norm: NormConfig = NormConfig(),
    **more: Any,
) -> TransformerConfig:
    """Put a model together.

    Args:
      raw: The config.
      attention: Of all layers.
      layers: One a layer.
      max_len: Positions.
      norm_eps: The family's rms_norm_eps where the file states none.
      tied: The family's tie_word_embeddings where the file states none.
      norm: Where norms are.
      **more: Other fields of `TransformerConfig`.
    """
    epsilon = raw.number("rms_norm_eps", norm_eps)
    return TransformerConfig(
        vocab_size=raw.integer("vocab_size"),
        d_model=raw.integer("hidden_size"),
        max_len=max_len,
        attention=attention,
        layers=tuple(layers),
        norm=dataclasses.replace(norm, epsilon=epsilon),
        tie_embeddings=raw.flag("tie_word_embeddings", tied),
        **more,
    )
