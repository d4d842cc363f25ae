"""What every test and doctest runs under: strict JAX, several CPU devices, no network."""

import gc
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

# Set before jax, matplotlib or tokenizers are imported; commands that tests start inherit it.
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import jax
import pytest

# Needs torch and transformers, which only whoever makes fixtures has.
collect_ignore = ["fixtures/make.py"]

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Enough for a 2 x 2 mesh. A test on one device pays nothing for the others.
jax.config.update("jax_num_cpu_devices", 4)

hypothesis.settings.register_profile(
    "kvjax",
    deadline=None,  # the first example of a shape compiles
    max_examples=int(os.environ.get("KVJAX_EXAMPLES", "10")),
    derandomize="CI" in os.environ,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("kvjax")


def pytest_configure(config: pytest.Config) -> None:
    """Let JAX say, where it lowers a kernel for a GPU, that its Triton backend is to go."""
    config.addinivalue_line("filterwarnings", "ignore:.*Triton.*:DeprecationWarning")


@pytest.fixture(autouse=True, scope="session")
def full_products() -> None:
    """Multiply f32 as f32: the default on a GPU is TF32, of 11 bits, which no tolerance allows."""
    if jax.default_backend() == "gpu":
        jax.config.update("jax_default_matmul_precision", "highest")


# Every compiled program holds memory mappings; a process may have 65,530, and XLA:CPU dies beyond.
MAPPINGS = 20_000


@pytest.fixture(autouse=True)
def bounded_mappings() -> Iterator[None]:
    """Drop compiled programs between tests before the process runs out of memory mappings."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPPINGS:
        if (suites := sys.modules.get("kvjax.testing.conformance")) is not None:
            suites.suite.cache_clear()  # each holds its compiled steps
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Fail at the line that connects to elsewhere, instead of hanging or passing by luck."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: tuple) -> None:
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise RuntimeError(f"tests must not use the network, this one connects to {address}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect_here)
        yield
