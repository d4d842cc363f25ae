"""The conformance suite over every legal product of the registered members."""

import re

import pytest

from kvjax.testing import conformance

CONFIGS = list(conformance.legal_configs())


def readable(config) -> str:
    """An id that can be pasted after -k."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", config.label)


@pytest.mark.parametrize("config", CONFIGS, ids=readable)
def test_conformance(config, subtests):
    suite = conformance.suite(config)
    for name in conformance.CHECKS:
        with subtests.test(name):
            getattr(suite, name)()
