"""Overrides from the command line, typed by the field that they set.

A key is dotted: a field of the config, a label of a mapping, a field of what that holds, and so on.
Cache members are written as in `kvjax list`: `paged(page_size=32)`, `int(bits=4)`, and
`codecs(k=int(bits=4, axis="channel"), v=int(bits=4))` where keys and values differ.
"""

import ast
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.cache import CODECS, LAYOUTS, POLICIES, Codecs, PositionRule
from kvjax.cache.base import Codec, Layout, Policy
from kvjax.errors import ConfigError


def parse_codecs(text: str) -> Codec | Codecs:
    """Build one codec, or one for keys and one for values, from text.

    >>> parse_codecs('codecs(k=int(bits=4, axis="channel"), v=int(bits=4))').k.axis
    'channel'
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return CODECS.parse(text)  # says how to write it
    if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "codecs"):
        return CODECS.parse(text)
    fields = [field.name for field in dataclasses.fields(Codecs)]
    wrong = [str(word.arg) for word in node.keywords if word.arg not in fields]
    if node.args or wrong:
        raise ConfigError(f"cannot read {text!r}; write codecs({'=..., '.join(fields)}=...)")
    return Codecs(**{str(w.arg): CODECS.parse(ast.unparse(w.value)) for w in node.keywords})


def _parse_bool(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _parse_none(text: str) -> None:
    return {"none": None}[text.lower()]


# By the type that a field is annotated with; the first that fits a union's members is tried first.
PARSERS: dict[Any, Callable[[str], Any]] = {
    Layout: LAYOUTS.parse,
    Codecs: parse_codecs,
    Codec: CODECS.parse,
    Policy: POLICIES.parse,
    PositionRule: PositionRule.parse,
    types.NoneType: _parse_none,
    bool: _parse_bool,
    int: int,
    float: float,
    str: str,
}


def set_value(owner: Any, key: str, text: str) -> Any:
    """Return a copy of `owner` with the value at a dotted key replaced by what `text` says.

    Raises:
        ConfigError: an unknown name (the known ones are listed), or a value of the wrong type.

    >>> from kvjax.cache import CacheConfig
    >>> set_value(CacheConfig(codec="int(bits=8)"), "codec.bits", "4").codec.bits
    4
    """
    return _set(owner, key.split("."), text, key)


def _set(owner: Any, path: list[str], text: str, key: str) -> Any:
    name, *rest = path
    if isinstance(owner, Mapping):
        _check_known(name, list(owner), key)
        if not rest:
            fields = _field_names(owner[name])
            raise ConfigError(f"{key} is a whole entry; set a field of it: {', '.join(fields)}")
        return {**owner, name: _set(owner[name], rest, text, key)}
    _check_known(name, _field_names(owner), key)
    current = getattr(owner, name)
    if rest:
        return dataclasses.replace(owner, **{name: _set(current, rest, text, key)})
    return dataclasses.replace(
        owner, **{name: _parse(typing.get_type_hints(type(owner))[name], text, key)}
    )


def _field_names(owner: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(owner)] if _has_fields(owner) else []


def _has_fields(owner: Any) -> bool:
    return dataclasses.is_dataclass(owner) and not isinstance(owner, type)


def _check_known(name: str, known: list[str], key: str) -> None:
    if name not in known:
        raise ConfigError(f"unknown name {name!r} in {key!r}; known: {', '.join(known) or 'none'}")


def _parse(annotation: Any, text: str, key: str) -> Any:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = typing.get_args(annotation) if union else (annotation,)
    parsers = {kind: parse for kind, parse in PARSERS.items() if kind in members}
    if not parsers:
        raise ConfigError(f"{key} cannot be set from the command line; change the config file")
    for parse in parsers.values():
        try:
            return parse(text)
        except ConfigError:
            raise
        except (KeyError, ValueError):
            continue
    wanted = " or ".join("None" if k is types.NoneType else k.__name__ for k in parsers)
    raise ConfigError(f"{key}={text!r} is no {wanted}")
