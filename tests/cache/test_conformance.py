"""The conformance suite over the products of the registered members.

Over keys and values in contiguous stores it runs every legal product; over pages and over latents,
which members do not know of, a selection in which every two members still meet.
"""

import re

import pytest

from kvjax.testing import conformance

KV = list(conformance.legal_configs())
CASES = [("kv", config) for config in KV if config.layout.slot_multiple == 1]
CASES += [
    ("kv", config) for config in conformance.covering(c for c in KV if c.layout.slot_multiple > 1)
]
CASES += [
    ("latent", config) for config in conformance.covering(conformance.legal_configs("latent"))
]


def readable(value) -> str:
    """An id that can be pasted after -k."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", getattr(value, "label", value))


@pytest.mark.parametrize(("entry", "config"), CASES, ids=readable)
def test_conformance(entry, config, subtests):
    suite = conformance.suite(config, entry)
    for name in conformance.CHECKS:
        with subtests.test(name):
            getattr(suite, name)()
