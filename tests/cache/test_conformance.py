"""The conformance suite: every legal product of the registered members over keys and values.

Over latents it runs a selection in which every two members still meet.
"""

import re

import pytest

from kvjax.testing import conformance

CASES = [("kv", config) for config in conformance.legal_configs()]
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
