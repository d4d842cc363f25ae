"""The conformance suite over products of the registered members, for each kind of entry.

Every two members that may go together meet in some product of the selection that always runs;
`KVJAX_PRODUCTS=all` runs every legal product.
"""

import os
import re

import pytest

from kvjax.testing import conformance

CASES = [
    (entry, config)
    for entry in conformance.CASES
    for config in (
        conformance.legal_configs(entry)
        if os.environ.get("KVJAX_PRODUCTS") == "all"
        else conformance.covering(conformance.legal_configs(entry))
    )
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
