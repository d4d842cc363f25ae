"""Rotary positions as config files state them, settled for one context length.

Two generations of config.json are read: `rope_theta` and `rope_scaling` beside the sizes, and
`rope_parameters`, which holds both and which some families key by layer type. Where a value is
stated twice it must be the same: readers differ in which one they take.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvjax.checkpoints.raw_config import RawConfig
from kvjax.nn.rotary import Linear, Llama3, PairFactors, RotaryConfig, Scaling, Yarn

_ORIGINAL = "original_max_position_embeddings"
_COMMON = {"rope_type", "rope_theta", "partial_rotary_factor"}
# Other names of the same: old keys, and what Microsoft called LongRoPE at first.
_KEYS = {"type": "rope_type"}
_NAMES = {"su": "longrope"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions of a layer and what comes with them.

    Attributes:
      rotary: How queries and keys are turned.
      max_len: Positions that the model then has.
      score_gain: Factor that DeepSeek's models put on all scores besides (`mscale_all_dim`).
    """

    rotary: RotaryConfig
    max_len: int
    score_gain: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scaled:
    """What a kind of scaling comes to."""

    max_len: int
    theta: float
    scaling: Scaling | None = None
    magnitude: float = 1.0
    score_gain: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stated:
    """What the kinds read.

    Attributes:
      parameters: The merged rotary keys.
      dims: R.
      theta: Base of the frequencies.
      trained_len: max_position_embeddings.
      context_len: What the caller asked for.
    """

    parameters: RawConfig
    dims: int
    theta: float
    trained_len: int
    context_len: int | None

    def room(self, reach: float = 0) -> int:
        """Positions: what is asked for, up to what the file states or a scaling reaches."""
        return min(self.context_len or self.trained_len, max(self.trained_len, int(reach)))

    @property
    def original_len(self) -> int:
        """Context before the scaling."""
        return self.parameters.integer(_ORIGINAL, self.trained_len)


def _default(stated: _Stated) -> _Scaled:
    return _Scaled(max_len=stated.room(), theta=stated.theta)


def _linear(stated: _Stated) -> _Scaled:
    factor = stated.parameters.number("factor")
    return _Scaled(max_len=stated.room(), theta=stated.theta, scaling=Linear(factor=factor))


def _dynamic(stated: _Stated) -> _Scaled:
    """NTK: the base follows the length of the text; here it is settled for the context length."""
    factor, R = stated.parameters.number("factor"), stated.dims
    length = stated.context_len or stated.trained_len
    theta = stated.theta
    if length > stated.trained_len:
        growth = factor * length / stated.trained_len - (factor - 1)
        theta *= growth ** (R / (R - 2))
    return _Scaled(max_len=length, theta=theta)


def _llama3(stated: _Stated) -> _Scaled:
    scaling = Llama3(
        factor=stated.parameters.number("factor"),
        low_freq_factor=stated.parameters.number("low_freq_factor"),
        high_freq_factor=stated.parameters.number("high_freq_factor"),
        original_len=stated.original_len,
    )
    room = stated.room(scaling.factor * scaling.original_len)
    return _Scaled(max_len=room, theta=stated.theta, scaling=scaling)


def _mscale(factor: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(stated: _Stated) -> _Scaled:
    parameters, original = stated.parameters, stated.original_len
    factor = parameters.number("factor", stated.trained_len / original)
    some = parameters.number("mscale", None, zero=True)
    every = parameters.number("mscale_all_dim", None, zero=True)
    if some and every:
        magnitude = _mscale(factor, some) / _mscale(factor, every)
    else:
        magnitude = _mscale(factor)
    scaling = Yarn(
        factor=factor,
        original_len=original,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
    )
    return _Scaled(
        # Files are often told of yarn without a change of max_position_embeddings.
        max_len=stated.room(factor * original),
        theta=stated.theta,
        scaling=scaling,
        magnitude=parameters.number("attention_factor", magnitude),
        score_gain=_mscale(factor, every) ** 2 if every else 1.0,
    )


def _longrope(stated: _Stated) -> _Scaled:
    """Two lists of factors: one for texts of the original context, one for longer ones.

    The original context is the default: the long factors change the results of short texts.
    """
    parameters = stated.parameters
    original = parameters.integer(_ORIGINAL)
    factor = parameters.number("factor", stated.trained_len / original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    length = stated.context_len or original
    lists = {
        key: parameters.numbers(key, stated.dims // 2) for key in ("short_factor", "long_factor")
    }
    return _Scaled(
        max_len=length,
        theta=stated.theta,
        scaling=PairFactors(factors=lists["long_factor" if length > original else "short_factor"]),
        magnitude=parameters.number("attention_factor", magnitude),
    )


@dataclasses.dataclass(frozen=True)
class _Kind:
    settle: Callable[[_Stated], _Scaled]
    keys: set[str]


_KINDS = {
    "default": _Kind(_default, set()),
    "linear": _Kind(_linear, {"factor"}),
    "dynamic": _Kind(_dynamic, {"factor"}),
    "llama3": _Kind(_llama3, {"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
    "yarn": _Kind(
        _yarn,
        {
            "factor", _ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale",
            "mscale_all_dim", "truncate",
        },
    ),
    "longrope": _Kind(
        _longrope, {"factor", _ORIGINAL, "attention_factor", "short_factor", "long_factor"}
    ),
}  # fmt: skip


def read_rope(
    raw: RawConfig,
    head_dim: int,
    *,
    theta: float = 10_000.0,
    max_len: int | None = None,
    partial: bool = False,
    scaling: Mapping[str, Any] | None = None,
) -> Rope:
    """Return the rotary positions that all layers share.

    Args:
      raw: The config.
      head_dim: Channels of a head that may be turned.
      theta: The family's base where the file states none.
      max_len: The family's max_position_embeddings where the file states none.
      partial: The family knows heads that are turned in part.
      scaling: The family's scaling where the file states none.

    >>> from pathlib import Path
    >>> scaling = {"type": "dynamic", "factor": 2.0}
    >>> keys = {"max_position_embeddings": 64, "rope_scaling": scaling}
    >>> raw = RawConfig(keys, Path("config.json"), context_len=128)
    >>> rope = read_rope(raw, head_dim=4)
    >>> rope.max_len, round(rope.rotary.theta)
    (128, 90000)
    """
    stated = [raw.nested("rope_parameters"), raw.nested("rope_scaling")]
    objects = [dict(part.values) for part in stated if part is not None]
    if not objects and scaling is not None:
        objects = [dict(scaling)]
    top = {key: raw.values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    return _settle(raw, head_dim, [top, *objects], theta, max_len, partial)


def read_rope_of_layer_type(
    raw: RawConfig,
    head_dim: int,
    layer_type: str,
    *,
    theta_key: str,
    theta: float,
    max_len: int | None = None,
    scaled: bool = False,
) -> Rope:
    """Return the rotary positions of the layers of one type.

    Args:
      raw: The config.
      head_dim: Channels of a head that may be turned.
      layer_type: Key in `rope_parameters`.
      theta_key: Where older files keep the base of this type.
      theta: The family's base where the file states none.
      max_len: The family's max_position_embeddings where the file states none.
      scaled: `rope_scaling` of older files is meant for this type.
    """
    objects: list[Mapping[str, Any]] = [{"rope_theta": raw.values.get(theta_key)}]
    if (by_type := raw.nested("rope_parameters")) is not None:
        unknown = by_type.values.keys() - {"full_attention", "sliding_attention"}
        if unknown:
            raise raw.error(
                f"rope_parameters has keys that are not known: {', '.join(sorted(unknown))}; "
                "known: full_attention, sliding_attention"
            )
        if (own := by_type.nested(layer_type)) is not None:
            objects.append(own.values)
    if scaled and (scaling := raw.nested("rope_scaling")) is not None:
        objects.append(scaling.values)
    return _settle(raw, head_dim, objects, theta, max_len, partial=False)


def _settle(
    raw: RawConfig,
    head_dim: int,
    objects: Iterable[Mapping[str, Any]],
    theta: float,
    max_len: int | None,
    partial: bool,
) -> Rope:
    merged = _merge(raw, objects)
    name = merged.get("rope_type", "default")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise raw.error(f"rotary type {name!r} is not known; known: {', '.join(_KINDS)}")
    if _ORIGINAL in kind.keys and raw.has(_ORIGINAL):
        merged = _merge(raw, [merged, {_ORIGINAL: raw.values[_ORIGINAL]}])
    unknown = merged.keys() - kind.keys - _COMMON
    if unknown:
        raise raw.error(
            f"rotary type {name!r} has keys that are not known: {', '.join(sorted(unknown))}"
        )
    parameters = dataclasses.replace(raw, values=merged)
    fraction = parameters.number("partial_rotary_factor", 1.0)
    if not (fraction == 1 or (partial and fraction < 1)):
        raise raw.error(f"partial_rotary_factor={fraction} is not supported by this model_type")
    stated = _Stated(
        parameters=parameters,
        dims=int(head_dim * fraction),
        theta=parameters.number("rope_theta", theta),
        trained_len=raw.integer(
            "max_position_embeddings", *(() if max_len is None else (max_len,))
        ),
        context_len=raw.context_len,
    )
    scaled = kind.settle(stated)
    return Rope(
        rotary=RotaryConfig(
            dims=stated.dims,
            theta=scaled.theta,
            scaling=scaled.scaling,
            magnitude=scaled.magnitude,
        ),
        max_len=scaled.max_len,
        score_gain=scaled.score_gain,
    )


def _merge(raw: RawConfig, objects: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key, value in (item for part in objects for item in part.items()):
        if value is None:
            continue
        key = _KEYS.get(key, key)
        if key == "rope_type" and isinstance(value, str):
            value = _NAMES.get(value, value)
        if merged.setdefault(key, value) != value:
            raise raw.error(f"two different {key}: {merged[key]!r} and {value!r}")
    return merged
