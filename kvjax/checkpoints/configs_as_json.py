"""Model configs as JSON and back, for kvjax's own checkpoints."""

import dataclasses
from typing import Any

from kvjax.errors import CheckpointError
from kvjax.nn import config as model_config
from kvjax.nn import rotary

# Every class that a TransformerConfig may hold, by the name that is written.
_CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        model_config.TransformerConfig,
        model_config.AttentionConfig,
        model_config.LatentAttentionConfig,
        model_config.LayerConfig,
        model_config.MLPConfig,
        model_config.MoEConfig,
        model_config.RouterConfig,
        model_config.NormConfig,
        rotary.RotaryConfig,
        rotary.Linear,
        rotary.Llama3,
        rotary.Yarn,
        rotary.PairFactors,
        rotary.Frequencies,
    )
}


def to_json(value: Any) -> Any:
    """Turn a config into what `json.dump` takes.

    >>> to_json(rotary.Linear(factor=2.0))
    {'class': 'Linear', 'factor': 2.0}
    """
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    return [to_json(item) for item in value] if isinstance(value, tuple) else value


def from_json(value: Any) -> Any:
    """Build the config that `to_json` wrote.

    Raises:
        CheckpointError: a class or field that this version does not know.
    """
    if isinstance(value, list):
        return tuple(map(from_json, value))
    if not isinstance(value, dict):
        return value
    fields = dict(value)
    name = fields.pop("class", None)
    cls = _CLASSES.get(name)
    if cls is None:
        raise CheckpointError(f"unknown part of a config {name!r}; known: {', '.join(_CLASSES)}")
    try:
        return cls(**{key: from_json(item) for key, item in fields.items()})
    except TypeError as error:
        raise CheckpointError(f"{name}: {error}; written by another version of kvjax?") from None
