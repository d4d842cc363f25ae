"""The alphabet: one letter per array axis, used in code, comments, einsums and tests.

| letter | axis                | letter | axis                         |
|--------|---------------------|--------|------------------------------|
| B      | sequences           | D      | model dim                    |
| T      | new tokens          | F      | MLP dim                      |
| S      | cache slots         | V      | vocabulary                   |
| N      | query heads         | L      | layers                       |
| K      | KV heads            | P      | pages in the pool            |
| G      | N // K              | Z      | tokens per page              |
| H      | head dim            | M      | pages per sequence           |
| C      | latent dim          | R      | rotary dim of a latent cache |
| E      | experts             | W      | stored width of a token      |
"""

import dataclasses

from kvjax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheDims:
    """What a cache must know of the model: sizes only.

    Attributes:
        num_layers: L.
        num_heads: N, query heads.
        num_kv_heads: K, heads that are cached.
        head_dim: H, width of a key.
        value_dim: width of a value; None means H.
        dtype: dtype of fresh keys and values, and of a cache that stores them as they are.

    >>> CacheDims(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16).groups
    3
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def groups(self) -> int:
        """G, query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def fields(self) -> dict[str, int]:
        """Width of each field of an entry: what one head stores for one token."""
        return {"k": self.head_dim, "v": self.value_dim or self.head_dim}


def round_up(value: int, multiple: int) -> int:
    """Round `value` up to a multiple of `multiple`.

    >>> round_up(17, 16)
    32
    """
    return -(-value // multiple) * multiple
