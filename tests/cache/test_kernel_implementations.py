"""Caches over the Pallas kernels: the conformance checks with attention and append from them.

Interpreted on a CPU, native on the device that they are for. Sizes are small and the products few:
`tests/pallas_kernels` holds the odd sizes, the ordinary suite all products on "xla".
"""

import pytest

from kvjax import CacheConfig, Codecs, Float8, Hadamard, Int, Paged, Raw, SinkWindow, Window
from kvjax.testing import conformance
from pallas_kernels.attention import IMPLEMENTATIONS
from tests.pallas_kernels.implementations import runnable

KERNELS = [x for x in runnable(IMPLEMENTATIONS) if x not in ("reference", "xla")]
KIVI = Codecs(k=Int(bits=2, axis="channel", group_size=8), v=Int(bits=4, group_size=4))
CONFIGS = {
    "int4-paged": ("kv", CacheConfig(layout=Paged(page_size=8), codec=Int(bits=4, group_size=4))),
    "int8-window": ("kv", CacheConfig(codec=Int(bits=8), policy=Window(window=16))),
    "kivi-slack": ("kv", CacheConfig(layout=Paged(page_size=8), codec=KIVI, slack=3)),
    "bf16-sinks": (
        "kv",
        CacheConfig(
            codec=Raw(dtype="bfloat16"),
            policy=SinkWindow(sinks=4, window=12),
            positions="unrotated_slot",
        ),
    ),
    "hadamard4": ("kv", CacheConfig(codec=Hadamard(bits=4))),
    "latent-float8": ("latent", CacheConfig(layout=Paged(page_size=8), codec=Float8())),
}
CHECKS = ["check_oracle", "check_rollback"]


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", CONFIGS)
def test_conformance(name: str, implementation: str, subtests):
    entry, config = CONFIGS[name]
    suite = conformance.suite(config.replace(implementation=implementation), entry)
    for check in CHECKS:
        with subtests.test(check):
            getattr(suite, check)()
