"""Typed access to a config.json, with errors that name file, key and value."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvjax.errors import CheckpointError

T = TypeVar("T")
_REQUIRED: Any = object()

# Above any model there is. A damaged count would otherwise fill the memory before it is noticed.
_MOST = 1 << 40
_MOST_LAYERS = 4096
_MOST_EXPERTS = 65_536


@dataclasses.dataclass(frozen=True)
class RawConfig:
    """A config.json as read, or an object inside of one.

    A key that is null counts as absent: writers of config files use both for the default.

    Attributes:
      values: The keys.
      source: File that they come from, for messages.
      context_len: Context that the caller asked for; None is the checkpoint's own.
    """

    values: Mapping[str, Any]
    source: Path
    context_len: int | None = None

    def error(self, message: str) -> CheckpointError:
        """Return an error that names the file."""
        return CheckpointError(f"{self.source}: {message}")

    def _get(self, key: str, default: Any, check: Callable[[Any], bool], expected: str) -> Any:
        value = self.values.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(f"the key {key} is missing")
            return default
        if not check(value):
            raise self.error(f"{key}={value!r}, expected {expected}")
        return value

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def integer(
        self, key: str, default: Any = _REQUIRED, *, least: int = 1, most: int = _MOST
    ) -> Any:
        """Return a whole number from `least` to `most`."""
        return self._get(
            key,
            default,
            lambda v: type(v) is int and least <= v <= most,
            f"a whole number from {least}" + ("" if most == _MOST else f" to {most}"),
        )

    def integer_or_null(self, key: str, default: int | None) -> int | None:
        """Return a whole number; here null is a value of its own and only absence the default."""
        return None if key in self.values and not self.has(key) else self.integer(key, default)

    def number(self, key: str, default: Any = _REQUIRED, *, zero: bool = False) -> Any:
        """Return a finite number above 0, or of at least 0, as float."""
        value = self._get(
            key,
            default,
            lambda v: type(v) in (int, float) and math.isfinite(v) and (v > 0 or (zero and v == 0)),
            f"a finite number {'of at least' if zero else 'above'} 0",
        )
        return None if value is None else float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        return self._get(key, default, lambda v: type(v) is bool, "true or false")

    def choice(self, key: str, default: Any, known: Mapping[str, T]) -> T:
        """Return what `known` has for the name that the key holds."""
        name = self._get(key, default, lambda v: type(v) is str, "a name")
        if name not in known:
            raise self.error(f"{key} {name!r} is not known; known: {', '.join(known)}")
        return known[name]

    def items(self, key: str, kind: type[T], length: int | None = None) -> Sequence[T] | None:
        """Return a list whose items are all of `kind`, or None where the key is absent."""
        return self._get(
            key,
            None,
            lambda v: (
                isinstance(v, list)
                and all(type(item) is kind for item in v)
                and length in (None, len(v))
            ),
            f"a list of {'' if length is None else f'{length} '}{kind.__name__}",
        )

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Return a list of `length` finite numbers above 0."""
        values = self._get(
            key,
            _REQUIRED,
            lambda v: (
                isinstance(v, list)
                and len(v) == length
                and all(type(x) in (int, float) and math.isfinite(x) and x > 0 for x in v)
            ),
            f"a list of {length} finite numbers above 0",
        )
        return tuple(map(float, values))

    def nested(self, key: str) -> "RawConfig | None":
        """Return the object that a key holds, or None where the key is absent."""
        value = self._get(key, None, lambda v: isinstance(v, dict), "an object or null")
        return None if value is None else dataclasses.replace(self, values=value)

    def refuse(self, key: str, *harmless: Any) -> None:
        """Refuse a key whose value would change the model in a way that is not built."""
        if self.has(key) and self.values[key] not in harmless:
            raise self.error(f"{key}={self.values[key]!r} is not supported")

    @property
    def num_layers(self) -> int:
        """L."""
        return self.integer("num_hidden_layers", most=_MOST_LAYERS)

    def num_experts(self, key: str, default: Any = _REQUIRED) -> int:
        """Return E, under the name that the family has for it."""
        return self.integer(key, default, most=_MOST_EXPERTS)
