"""The conformance suite over every legal product of the registered members."""

import pytest

from kvjax.testing import conformance

CONFIGS = list(conformance.legal_configs())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.label.replace(" ", ""))
def test_conformance(config, subtests):
    suite = conformance.suite(config)
    for name in conformance.CHECKS:
        with subtests.test(name):
            getattr(suite, name)()
