"""`CacheConfig`: the four choices of a cache, checked when it is built."""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from kvjax.cache.base import (
    ROTATED_ABSOLUTE,
    Codec,
    Layout,
    Policy,
    PositionRule,
    check_at_least,
)
from kvjax.cache.codecs import CODECS, Raw
from kvjax.cache.layouts import LAYOUTS, Contiguous
from kvjax.cache.legality import illegal_reasons
from kvjax.cache.policies import POLICIES, KeepAll
from kvjax.dims import CacheDims
from kvjax.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codecs:
    """Different codecs for the fields of an entry; a field that is not named is stored raw.

    Attributes:
        k: keys.
        v: values.
        c: latents, of a model with latent attention.
        k_rope: the rotary keys beside them.

    >>> from kvjax import Int
    >>> Codecs(k=Int(bits=4, axis="channel"), v=Int(bits=4)).k.group
    32
    """

    k: Codec | None = None
    v: Codec | None = None
    c: Codec | None = None
    k_rope: Codec | None = None

    def __post_init__(self) -> None:
        if not self.named:
            raise ConfigError("Codecs() names no field: give k and v, or c and k_rope")

    @property
    def named(self) -> dict[str, Codec]:
        """The codecs that were given, by field."""
        return {name: codec for name, codec in vars(self).items() if codec is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """layout x codec x policy x position rule.

    Members may be given by name and knobs, as text: `CacheConfig(policy="window(window=256)")`.

    Attributes:
        layout: where the bytes of a slot live.
        codec: how entries are encoded; `Codecs(k=..., v=...)` where their fields differ.
        policy: who stays and who is visible.
        positions: what position a slot's key stands for: a `PositionRule` or its name.
        slack: newest tokens that `rollback` may forget.
        implementation: which attention implementation runs.

    Raises:
        ConfigError: an unknown name or knob, or members that do not go together, with the reason.

    >>> CacheConfig(codec="int(bits=4)").label
    'contiguous / int(bits=4) / keep_all / rotated_absolute'
    """

    layout: Layout = dataclasses.field(default_factory=Contiguous)
    codec: Codec | Codecs = dataclasses.field(default_factory=Raw)
    policy: Policy = dataclasses.field(default_factory=KeepAll)
    positions: PositionRule = ROTATED_ABSOLUTE
    slack: int = 0
    implementation: str = "auto"

    def __post_init__(self) -> None:
        for name, parse in (
            ("layout", LAYOUTS.parse),
            ("codec", CODECS.parse),
            ("policy", POLICIES.parse),
            ("positions", PositionRule.parse),
        ):
            value = getattr(self, name)
            if type(value) is str:
                object.__setattr__(self, name, parse(value))
        check_at_least(self, slack=0)
        LAYOUTS.name_of(self.layout)
        POLICIES.name_of(self.policy)
        for codec in self.distinct_codecs:
            CODECS.name_of(codec)
        reasons = illegal_reasons(self)
        if reasons:
            raise ConfigError(f"illegal cache {self.label}: {'; '.join(reasons)}")

    @property
    def distinct_codecs(self) -> tuple[Codec, ...]:
        """The codecs that were chosen, each once."""
        if isinstance(self.codec, Codecs):
            return tuple(dict.fromkeys(self.codec.named.values()))
        return (self.codec,)

    @property
    def key_codecs(self) -> tuple[Codec, ...]:
        """The codecs that may hold keys which positions turn."""
        if not isinstance(self.codec, Codecs):
            return (self.codec,)
        named = self.codec.named
        return tuple(named[name] for name in ("k", "k_rope") if name in named)

    def codecs_of(self, fields: Iterable[str]) -> dict[str, Codec]:
        """Codec of each field of an entry.

        Raises:
            ConfigError: codecs were chosen for fields that the entry does not have.

        >>> CacheConfig().codecs_of(["c", "k_rope"])
        {'c': Raw(dtype=None), 'k_rope': Raw(dtype=None)}
        """
        if not isinstance(self.codec, Codecs):
            return dict.fromkeys(fields, self.codec)
        named, fields = self.codec.named, tuple(fields)
        strange = sorted(named.keys() - set(fields))
        if strange:
            raise ConfigError(
                f"a codec is chosen for {', '.join(strange)}, but this model caches "
                f"{' and '.join(fields)}"
            )
        return {name: named.get(name, Raw()) for name in fields}

    @property
    def label(self) -> str:
        """One line that tells the four choices apart."""
        if isinstance(self.codec, Codecs):
            named = self.codec.named.items()
            codec = " + ".join(f"{name}={member_label(CODECS, c)}" for name, c in named)
        else:
            codec = member_label(CODECS, self.codec)
        parts = [
            member_label(LAYOUTS, self.layout),
            codec,
            member_label(POLICIES, self.policy),
            self.positions.name,
        ]
        return " / ".join(parts + ([f"slack={self.slack}"] if self.slack else []))

    def replace(self, **changes: Any) -> "CacheConfig":
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def for_layers(self, num_layers: int) -> tuple["CacheConfig", ...]:
        """The same config for every layer."""
        return (self,) * num_layers

    def init(self, dims: CacheDims, batch: int, max_len: int):
        """Allocate an empty `Cache` for `batch` sequences of up to `max_len` tokens."""
        from kvjax.cache.cache import init_cache

        return init_cache(self, dims, batch, max_len)

    def predict_nbytes(self, dims: CacheDims, batch: int, max_len: int):
        """`ByteReport` of the cache that `init` would allocate, without allocating it."""
        from kvjax.cache.accounting import predict_nbytes

        return predict_nbytes(self, dims, batch, max_len)


@dataclasses.dataclass(frozen=True)
class LayerPattern:
    """Layers that differ: a default and exceptions by layer; negative layers count from the end.

    >>> from kvjax import Int
    >>> ends = LayerPattern(CacheConfig(codec=Int(bits=4)), {0: CacheConfig(), -1: CacheConfig()})
    >>> [c.label.split(" / ")[1] for c in ends.for_layers(3)]
    ['raw', 'int(bits=4)', 'raw']
    """

    default: CacheConfig
    exceptions: Mapping[int, CacheConfig] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exceptions", MappingProxyType(dict(self.exceptions)))

    def __hash__(self) -> int:
        return hash((self.default, tuple(self.exceptions.items())))

    @property
    def label(self) -> str:
        """One line: the default, then each exception."""
        others = [f"layer {i}: {c.label}" for i, c in self.exceptions.items()]
        return "; ".join([self.default.label, *others])

    @property
    def implementation(self) -> str:
        """Attention implementation of the default layers."""
        return self.default.implementation

    def replace(self, **changes: Any) -> "LayerPattern":
        """Return a copy with some fields changed in every layer."""
        exceptions = {i: c.replace(**changes) for i, c in self.exceptions.items()}
        return LayerPattern(self.default.replace(**changes), exceptions)

    def for_layers(self, num_layers: int) -> tuple[CacheConfig, ...]:
        """The config of each layer."""
        layers = [self.default] * num_layers
        for index, config in self.exceptions.items():
            if not -num_layers <= index < num_layers:
                raise ConfigError(f"pattern names layer {index}; the model has {num_layers}")
            layers[index] = config
        return tuple(layers)

    def init(self, dims: CacheDims, batch: int, max_len: int):
        """Allocate an empty `Cache`; see `CacheConfig.init`."""
        from kvjax.cache.cache import init_cache

        return init_cache(self, dims, batch, max_len)

    def predict_nbytes(self, dims: CacheDims, batch: int, max_len: int):
        """Predict the bytes of `init`; see `CacheConfig.predict_nbytes`."""
        from kvjax.cache.accounting import predict_nbytes

        return predict_nbytes(self, dims, batch, max_len)


def member_label(registry, member) -> str:
    """Name of a member and the knobs that differ from their defaults.

    >>> from kvjax import Window
    >>> member_label(POLICIES, Window(window=8))
    'window(window=8)'
    """
    knobs = [
        f"{field.name}={getattr(member, field.name)!r}"
        for field in dataclasses.fields(member)
        if field.default is dataclasses.MISSING
        or getattr(member, field.name) != field.default
        or field.name == "bits"
    ]
    return registry.name_of(member) + (f"({', '.join(knobs)})" if knobs else "")
