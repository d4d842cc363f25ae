"""Checks of the fields of model configs; each raises ConfigError with name and value."""

import math

from kvjax.errors import ConfigError


def check_sizes(config: object, *names: str) -> None:
    """Refuse fields that are no whole numbers of at least 1."""
    for name in names:
        value = getattr(config, name)
        # bool counts as int for Python; a size of True is a slip.
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name}={value!r}, expected a whole number of at least 1")


def check_positive(config: object, *names: str) -> None:
    """Refuse fields that are no finite numbers above 0."""
    for name in names:
        value = getattr(config, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{name}={value!r}, expected a finite number above 0")


def check_flags(config: object, *names: str) -> None:
    """Refuse fields that are neither True nor False."""
    for name in names:
        if not isinstance(getattr(config, name), bool):
            raise ConfigError(f"{name}={getattr(config, name)!r}, expected True or False")


def check_choice(config: object, name: str, known: tuple[str, ...]) -> None:
    """Refuse a field that is none of the known."""
    if getattr(config, name) not in known:
        raise ConfigError(f"unknown {name} {getattr(config, name)!r}; known: {', '.join(known)}")
