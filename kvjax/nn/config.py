"""The shape of a decoder model: everything that its parameters and its cache depend on.

One `TransformerConfig` spans the decoder families: what all layers share is stated once, and where
layers differ (window, rotary positions, dense or expert MLP, whose store is read) each says so in
its own `LayerConfig`. A family's config map (`kvjax.checkpoints.families`) turns a config.json into
one of these.
"""

import dataclasses
import math

from kvjax.dims import CacheDims
from kvjax.errors import ConfigError
from kvjax.nn.checks import check_choice, check_flags, check_positive, check_sizes
from kvjax.nn.mlp_config import MLPConfig, MoEConfig, RouterConfig
from kvjax.nn.rotary import RotaryConfig

__all__ = [
    "AttentionConfig",
    "LatentAttentionConfig",
    "LayerConfig",
    "MLPConfig",
    "MoEConfig",
    "NormConfig",
    "RouterConfig",
    "TransformerConfig",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention: N query heads over K heads of keys and values.

    Attributes:
      num_heads: N, query heads.
      num_kv_heads: K, key and value heads; divides N.
      head_dim: H; not always D // N.
      bias: The projections of queries, keys and values have biases.
      out_bias: The output projection has one.
      qk_norm: RMS norm of queries and keys before they are rotated: "none", over each "head", or
        over the whole "projection" of all heads.
      scale: Factor on the scores; None is H ** -0.5.
      softcap: c of c * tanh(score / c) on the scaled scores; None is off.
      sink_logits: Each head has a trained logit that takes part in the softmax without a value.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    out_bias: bool = False
    qk_norm: str = "none"
    scale: float | None = None
    softcap: float | None = None
    sink_logits: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "num_kv_heads", "head_dim")
        check_flags(self, "bias", "out_bias", "sink_logits")
        check_choice(self, "qk_norm", ("none", "head", "projection"))
        check_positive(
            self, *(name for name in ("scale", "softcap") if getattr(self, name) is not None)
        )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def cached(self) -> dict[str, int]:
        """Sizes of what is cached, as `CacheDims` takes them."""
        return {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}

    @property
    def turned_dim(self) -> int:
        """Channels that rotary positions may turn."""
        return self.head_dim

    def parameter_count(self, width: int) -> int:
        """Trained values of one layer of `width` D."""
        N, K, H = self.num_heads, self.num_kv_heads, self.head_dim
        count = width * (N + 2 * K) * H + N * H * width
        count += self.bias * (N + 2 * K) * H + self.out_bias * width + self.sink_logits * N
        return count + {"none": 0, "head": 2 * H, "projection": (N + K) * H}[self.qk_norm]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434).

    A token is cached as one latent and one rotary key for all heads.

    Attributes:
      num_heads: N.
      latent_dim: C, width of the latent of keys and values (kv_lora_rank).
      rope_dim: R, width of the rotary key that all heads share (qk_rope_head_dim).
      nope_dim: Width of a head's key without positions (qk_nope_head_dim); may be 0.
      value_dim: Width of a head's value (v_head_dim).
      query_dim: Width of the latent of queries (q_lora_rank); None projects queries directly.
      norm_epsilon: Of the RMS norms on the latents; None leaves these norms out.
      scale: Factor on the scores; None is (nope_dim + rope_dim) ** -0.5.
    """

    num_heads: int
    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_dim: int | None = None
    norm_epsilon: float | None = 1e-6
    scale: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "latent_dim", "rope_dim", "value_dim")
        if type(self.nope_dim) is not int or self.nope_dim < 0:
            raise ConfigError(f"nope_dim={self.nope_dim!r}, expected a whole number of at least 0")
        if self.query_dim is not None:
            check_sizes(self, "query_dim")
        check_positive(
            self, *(name for name in ("norm_epsilon", "scale") if getattr(self, name) is not None)
        )

    @property
    def cached(self) -> dict[str, int]:
        """Sizes of what is cached, as `CacheDims` takes them."""
        return {"num_kv_heads": 1, "latent_dim": self.latent_dim, "rope_dim": self.rope_dim}

    @property
    def turned_dim(self) -> int:
        """Channels that rotary positions may turn."""
        return self.rope_dim

    def parameter_count(self, width: int) -> int:
        """Trained values of one layer of `width` D."""
        N, C, R, Q = self.num_heads, self.latent_dim, self.rope_dim, self.query_dim
        key, norms = self.nope_dim + R, self.norm_epsilon is not None
        queries = width * N * key if Q is None else width * Q + norms * Q + Q * N * key
        latents = width * (C + R) + norms * C + C * N * (self.nope_dim + self.value_dim)
        return queries + latents + N * self.value_dim * width


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """RMS norms around attention and MLP.

    Attributes:
      epsilon: Added to the mean square.
      offset: The stored weight is the scale less 1 (Gemma).
      before: Normalise what goes into attention and MLP.
      after: Normalise what comes out, before it joins the residual stream.
    """

    epsilon: float = 1e-5
    offset: bool = False
    before: bool = True
    after: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.epsilon, int | float) or not 0 < self.epsilon < math.inf:
            raise ConfigError(f"norm_eps={self.epsilon!r}, expected a finite number above 0")
        check_flags(self, "offset", "before", "after")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """What one layer has of its own.

    Attributes:
      mlp: Dense or a mixture of experts.
      rotary: How positions turn queries and keys; None leaves them alone (NoPE).
      window: Keys that a query sees, itself included; None is all.
      reads: Earlier layer whose keys and values this one attends over instead of having its own
        (cross-layer attention, arXiv 2405.12981); None is its own.
    """

    mlp: MLPConfig | MoEConfig
    rotary: RotaryConfig | None = None
    window: int | None = None
    reads: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            check_sizes(self, "window")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and constants of a decoder.

    Attributes:
      vocab_size: V, rows of the embedding.
      d_model: D, width of the residual stream.
      max_len: Positions that the model was made for.
      attention: Heads and projections of every layer.
      layers: What each layer has of its own.
      norm: Where norms are and what they add.
      tie_embeddings: The output head is the embedding, transposed.
      embedding_scale: Factor on embeddings, rounded to the model's dtype; None is 1.
      logit_softcap: c of c * tanh(logit / c); None is off.

    >>> config = TransformerConfig.llama(
    ...     vocab_size=97, num_layers=2, d_model=64, num_heads=4, num_kv_heads=2,
    ...     head_dim=16, d_ff=128, max_len=256, tie_embeddings=True)
    >>> config.parameter_count
    80256
    """

    vocab_size: int
    d_model: int
    max_len: int
    attention: AttentionConfig | LatentAttentionConfig
    layers: tuple[LayerConfig, ...]
    norm: NormConfig = NormConfig()
    tie_embeddings: bool = False
    embedding_scale: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "vocab_size", "d_model", "max_len")
        check_flags(self, "tie_embeddings")
        check_positive(
            self,
            *(n for n in ("embedding_scale", "logit_softcap") if getattr(self, n) is not None),
        )
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ConfigError("num_layers=0, expected a whole number of at least 1")
        for i, layer in enumerate(self.layers):
            if layer.rotary and layer.rotary.dims > self.attention.turned_dim:
                raise ConfigError(
                    f"layer {i} turns {layer.rotary.dims} channels of {self.attention.turned_dim}"
                )
            if layer.reads is None:
                continue
            if not isinstance(self.attention, AttentionConfig):
                raise ConfigError("only grouped-query attention reads another layer's keys")
            if not 0 <= layer.reads < i or self.layers[layer.reads].reads is not None:
                raise ConfigError(
                    f"layer {i} reads the keys and values of layer {layer.reads!r}, "
                    "expected an earlier layer that has its own"
                )
            for name in ("window", "rotary"):
                mine, owner = (getattr(x, name) for x in (layer, self.layers[layer.reads]))
                if mine != owner:
                    raise ConfigError(
                        f"layer {i} has {name} {mine}, layer {layer.reads} whose keys it reads "
                        f"{owner}; they must be the same"
                    )

    @classmethod
    def llama(
        cls,
        *,
        vocab_size: int,
        num_layers: int,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        d_ff: int,
        max_len: int,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-5,
        tie_embeddings: bool = False,
    ) -> "TransformerConfig":
        """Build a plain Llama: all layers alike, pre-norm, rotary on the whole head."""
        if type(num_layers) is not int or num_layers < 1:
            raise ConfigError(f"num_layers={num_layers!r}, expected a whole number of at least 1")
        attention = AttentionConfig(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        layer = LayerConfig(
            mlp=MLPConfig(d_ff=d_ff), rotary=RotaryConfig(dims=head_dim, theta=rope_theta)
        )
        return cls(
            vocab_size=vocab_size,
            d_model=d_model,
            max_len=max_len,
            attention=attention,
            layers=(layer,) * num_layers,
            norm=NormConfig(epsilon=norm_eps),
            tie_embeddings=tie_embeddings,
        )

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    def cache_dims(self, dtype: str) -> CacheDims:
        """What a cache must know of a model of this config that computes in `dtype`."""
        windows = tuple(layer.window for layer in self.layers)
        own = tuple(range(self.num_layers))
        owners = tuple(
            i if layer.reads is None else layer.reads
            for i, layer in zip(own, self.layers, strict=True)
        )
        return CacheDims(
            num_layers=self.num_layers,
            num_heads=self.attention.num_heads,
            **self.attention.cached,
            dtype=dtype,
            windows=windows if any(windows) else (),
            owners=owners if owners != own else (),
        )

    @property
    def parameter_count(self) -> int:
        """Number of trained values; a tied head counts once."""
        V, D = self.vocab_size, self.d_model
        norms = 2 * (self.norm.before + self.norm.after) * D
        layers = sum(
            self._attention_count(layer) + layer.mlp.parameter_count(D) + norms
            for layer in self.layers
        )
        return V * D * (1 if self.tie_embeddings else 2) + layers + D

    def _attention_count(self, layer: LayerConfig) -> int:
        count = self.attention.parameter_count(self.d_model)
        if layer.reads is None:
            return count
        own = self.attention
        assert isinstance(own, AttentionConfig)  # checked when built
        K, H = own.num_kv_heads, own.head_dim
        norm = {"none": 0, "head": H, "projection": K * H}[own.qk_norm]
        return count - 2 * K * H * (self.d_model + own.bias) - norm
