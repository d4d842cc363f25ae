"""Published caches as choices of members."""

from kvjax.cache.codecs import Int
from kvjax.cache.config import Codecs


def KIVI(bits: int = 4, *, group_size: int = 32, residual: int = 128) -> Codecs:
    """KIVI (arXiv 2402.02750): keys by channel, values by token, newest tokens in full precision.

    The paper encodes a token's key and value at different times (keys when a residual is full,
    values as soon as they leave it). Here both wait in one tail of `residual` tokens and an open
    group, so a key and its value are always in the same form (docs/decisions.md, 4).

    Args:
        bits: 4 or 2, of keys and values.
        group_size: tokens of a group of keys, channels of a group of values.
        residual: newest tokens that stay in full precision.

    >>> KIVI(bits=2).k.axis, KIVI(bits=2).v.axis
    ('channel', 'token')
    """
    return Codecs(
        k=Int(bits=bits, axis="channel", group_size=group_size, residual=residual),
        v=Int(bits=bits, group_size=group_size, residual=residual),
    )
