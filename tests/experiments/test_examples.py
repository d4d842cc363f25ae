import doctest
import importlib

import pytest

MODULES = (
    *("ablate", "configuration", "environment", "generate", "listing", "measure"),
    *("overrides", "plots", "progress", "report", "rows"),
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    module = importlib.import_module(f"experiments.{name}")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(module, optionflags=flags).failed == 0
