"""Policies: which slot a token gets, who leaves, who is visible. One idea a file."""

from kvjax.cache.base import Policy
from kvjax.cache.policies.keep_all import KeepAll
from kvjax.cache.policies.sink_window import SinkWindow
from kvjax.cache.policies.window import Window
from kvjax.registry import Registry

POLICIES = Registry(
    "policy",
    Policy,
    {
        "keep_all": KeepAll,
        "window": Window,
        "sink_window": SinkWindow,
    },
)

__all__ = POLICIES.exports()
