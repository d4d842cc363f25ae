"""Registries: a name to a class, with errors that list what exists."""

import ast
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from kvjax.errors import ConfigError


class Registry(Mapping[str, type]):
    """The members of one kind (layout, codec, policy), by name; holds classes, never instances.

    >>> from kvjax.cache.codecs import CODECS
    >>> CODECS.parse("int(bits=4)").bits
    4
    """

    def __init__(self, kind: str, contract: type, members: dict[str, type]):
        self.kind = kind
        self._members = dict(members)
        for name, cls in members.items():
            _check_member(kind, name, cls, contract)

    def __getitem__(self, name: str) -> type:
        if name not in self._members:
            known = ", ".join(sorted(self._members))
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {known}")
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def exports(self) -> list[str]:
        """Class names of the members, for `__all__`: what is registered is public."""
        return [cls.__name__ for cls in self._members.values()]

    def name_of(self, member: object) -> str:
        """Return the registered name of an instance."""
        for name, cls in self._members.items():
            if cls is type(member):
                return name
        known = ", ".join(sorted(self._members))
        raise ConfigError(f"{member!r} is no registered {self.kind}; known: {known}")

    def create(self, name: str, knobs: dict[str, Any]) -> Any:
        """Build a member from its name and knobs; unknown knobs are refused by name."""
        cls = self[name]
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(knobs) - set(known))
        if unknown:
            raise ConfigError(
                f"{self.kind} {name!r} has no knob {', '.join(map(repr, unknown))}; "
                f"known: {', '.join(known) or 'none'}"
            )
        return cls(**knobs)

    def parse(self, text: str) -> Any:
        """Build a member from text such as `window(window=256)` or `raw`."""
        try:
            node = ast.parse(text.strip(), mode="eval").body
            call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
            if not isinstance(call.func, ast.Name) or call.args:
                raise SyntaxError
            knobs = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        except (SyntaxError, ValueError):
            raise ConfigError(
                f"cannot read {self.kind} {text!r}; write it like name or name(knob=value)"
            ) from None
        return self.create(call.func.id, knobs)


def _check_member(kind: str, name: str, cls: type, contract: type) -> None:
    """Refuse a class that does not meet the contract, for whoever adds a member."""
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen or not parameters.eq:
        raise TypeError(f"{kind} {name!r}: {cls.__name__} must be a frozen dataclass")
    asked = [key for key in vars(contract) if not key.startswith("_")]
    fields = {field.name for field in dataclasses.fields(cls)}
    missing = [key for key in asked if not hasattr(cls, key) and key not in fields]
    if missing:
        where = f"{contract.__module__}.{contract.__name__}"
        raise TypeError(f"{kind} {name!r}: {cls.__name__} lacks {', '.join(missing)} of {where}")
