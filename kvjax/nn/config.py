"""The shape of a decoder model: everything that its parameters and its cache depend on."""

import dataclasses
import math

from kvjax.errors import ConfigError

_SIZES = (
    "vocab_size",
    "num_layers",
    "d_model",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "d_ff",
    "max_len",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and constants of a Llama-family decoder.

    Attributes:
      vocab_size: V, rows of the embedding.
      num_layers: L.
      d_model: D, width of the residual stream.
      num_heads: N, query heads.
      num_kv_heads: K, key and value heads; divides N.
      head_dim: H, even; not always D // N.
      d_ff: F, width inside the MLP.
      rope_theta: Base of the rotary frequencies.
      norm_eps: Added to the mean square before its root.
      max_len: Positions that the model was trained for.
      tie_embeddings: The output head is the embedding, transposed.

    >>> config = TransformerConfig(
    ...     vocab_size=97, num_layers=2, d_model=64, num_heads=4, num_kv_heads=2,
    ...     head_dim=16, d_ff=128, max_len=256, tie_embeddings=True)
    >>> config.parameter_count
    80256
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    max_len: int
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            # bool counts as int for Python; a size of True is a slip.
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}, expected a whole number of at least 1")
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name}={value!r}, expected a finite number above 0")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim={self.head_dim} is odd; rotary positions turn pairs of channels"
            )
        if not isinstance(self.tie_embeddings, bool):
            raise ConfigError(f"tie_embeddings={self.tie_embeddings!r}, expected True or False")

    @property
    def parameter_count(self) -> int:
        """Number of trained values; a tied head counts once."""
        V, D, F, H = self.vocab_size, self.d_model, self.d_ff, self.head_dim
        N, K = self.num_heads, self.num_kv_heads
        attention = D * (N + 2 * K) * H + N * H * D
        layer = attention + 3 * D * F + 2 * D
        return V * D * (1 if self.tie_embeddings else 2) + self.num_layers * layer + D
