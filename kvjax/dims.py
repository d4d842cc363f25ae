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
    """What a cache must know of the model: sizes, and which layers differ.

    A model caches keys and values (`head_dim`, `value_dim`) or latents (`latent_dim`, `rope_dim`).

    Attributes:
        num_layers: L.
        num_heads: N, query heads.
        num_kv_heads: K, heads that are cached; 1 for latents.
        head_dim: H, width of a key.
        value_dim: width of a value; None means H.
        latent_dim: C, width of a latent.
        rope_dim: R, width of the rotary key beside it.
        dtype: dtype of fresh entries, and of a cache that stores them as they are.
        windows: keys that a query of each layer sees under the model, None for all; () is None
            everywhere.
        owners: layer whose store each layer reads and writes; () is its own everywhere.

    >>> CacheDims(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16).groups
    3
    >>> CacheDims(num_layers=2, num_heads=6, latent_dim=32, rope_dim=8).fields
    {'c': 32, 'k_rope': 8}
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int = 1
    head_dim: int | None = None
    value_dim: int | None = None
    latent_dim: int | None = None
    rope_dim: int | None = None
    dtype: str = "float32"
    windows: tuple[int | None, ...] = ()
    owners: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        latent = self.latent_dim is not None and self.rope_dim is not None
        if latent == (self.head_dim is not None):
            raise ConfigError("give head_dim, or latent_dim and rope_dim, and not both")
        if latent and self.num_kv_heads != 1:
            raise ConfigError(f"num_kv_heads={self.num_kv_heads}: all heads share one latent")
        for name, width in self.fields.items():
            if width < 1:
                raise ConfigError(f"{name} has width {width}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}"
            )
        for name in ("windows", "owners"):
            value = getattr(self, name)
            if value and len(value) != self.num_layers:
                raise ConfigError(f"{name} has {len(value)} entries for {self.num_layers} layers")
        for layer, owner in enumerate(self.owners):
            if not 0 <= owner <= layer or self.owners[owner] != owner:
                raise ConfigError(
                    f"layer {layer} reads the store of layer {owner}, which has none of its own"
                )

    @property
    def groups(self) -> int:
        """G, query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def entry(self) -> str:
        """Kind of entry that is cached, a name of `kvjax.cache.entries.ENTRIES`."""
        return "latent" if self.head_dim is None else "kv"

    @property
    def fields(self) -> dict[str, int]:
        """Width of each field of an entry: what one head stores for one token."""
        if self.head_dim is None:
            assert self.latent_dim is not None and self.rope_dim is not None
            return {"c": self.latent_dim, "k_rope": self.rope_dim}
        return {"k": self.head_dim, "v": self.value_dim or self.head_dim}

    def window(self, layer: int) -> int | None:
        """Keys that a query of a layer sees under the model; None is all."""
        return self.windows[layer] if self.windows else None

    def owner(self, layer: int) -> int:
        """Layer whose store `layer` reads."""
        return self.owners[layer] if self.owners else layer


def round_up(value: int, multiple: int) -> int:
    """Round `value` up to a multiple of `multiple`.

    >>> round_up(17, 16)
    32
    """
    return -(-value // multiple) * multiple
