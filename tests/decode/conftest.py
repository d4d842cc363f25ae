"""Decode tests compile many small programs: LLVM's expensive passes would be most of their time."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
