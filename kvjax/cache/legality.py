"""Which members go together: each rule names what it refuses and why.

A new member is legal with everything unless a rule here says otherwise; rules speak of what members
declare (`group`, `sinks`, `slot_multiple`), never of their classes.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvjax.cache.config import CacheConfig


class Rule(NamedTuple):
    """A combination that makes no sense."""

    name: str
    breaks: "Callable[[CacheConfig], bool]"
    reason: "Callable[[CacheConfig], str]"


def token_group(config: "CacheConfig") -> int:
    """Tokens that a layer encodes together: all its fields at once."""
    return math.lcm(*(codec.group for codec in config.distinct_codecs))


RULES = (
    Rule(
        "keys in another basis that are rotated when they are read",
        lambda c: not c.positions.rotated and any(codec.basis for codec in c.key_codecs),
        lambda c: (
            f"positions={c.positions.name!r} rotates keys when they are read, but their codec "
            "stores them in another basis, where there are no pairs to rotate; use "
            "positions='rotated_absolute', or another codec for keys"
        ),
    ),
    Rule(
        "rotated keys with slot positions",
        lambda c: c.positions.rotated and c.positions.slot,
        lambda c: (
            "rotated keys with slot positions: a stored rotation cannot follow a key whose slot "
            "position changes; use positions='unrotated_slot'"
        ),
    ),
    Rule(
        "sinks that split an encoded group",
        lambda c: c.policy.sinks % token_group(c) != 0,
        lambda c: (
            f"sinks={c.policy.sinks} is no multiple of the codec's group of {token_group(c)} "
            "tokens, so a group would be half evicted; make it one"
        ),
    ),
    Rule(
        "pages that split an encoded group",
        lambda c: c.layout.slot_multiple > 1 and c.layout.slot_multiple % token_group(c) != 0,
        lambda c: (
            f"page_size={c.layout.slot_multiple} is no multiple of the codec's group of "
            f"{token_group(c)} tokens; make it one"
        ),
    ),
)


def illegal_reasons(config: "CacheConfig") -> list[str]:
    """Why the members of `config` do not go together; empty if they do."""
    return [rule.reason(config) for rule in RULES if rule.breaks(config)]
