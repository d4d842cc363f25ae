"""Caches over the Pallas kernels: the conformance checks with attention and append from them.

Interpreted on a CPU, native on the device that they are for. Sizes are small and the products few:
`tests/pallas_kernels` holds the odd sizes, the ordinary suite all products on "xla".
"""

import pytest

from kvjax import CacheConfig, Codecs, Int, Paged, Raw, SinkWindow, Window
from kvjax.testing import conformance
from pallas_kernels.attention import IMPLEMENTATIONS
from tests.pallas_kernels.implementations import runnable

KERNELS = [x for x in runnable(IMPLEMENTATIONS) if x not in ("reference", "xla")]
KIVI = Codecs(k=Int(bits=2, axis="channel", group_size=8), v=Int(bits=4, group_size=4))
CONFIGS = {
    "int4-paged": CacheConfig(layout=Paged(page_size=8), codec=Int(bits=4, group_size=4)),
    "int8-window": CacheConfig(codec=Int(bits=8), policy=Window(window=16)),
    "kivi-slack": CacheConfig(layout=Paged(page_size=8), codec=KIVI, slack=3),
    "bf16-sinks": CacheConfig(
        codec=Raw(dtype="bfloat16"),
        policy=SinkWindow(sinks=4, window=12),
        positions="unrotated_slot",
    ),
}
CHECKS = ["check_oracle", "check_rollback"]


@pytest.mark.parametrize("implementation", KERNELS)
@pytest.mark.parametrize("name", CONFIGS)
def test_conformance(name: str, implementation: str, subtests):
    suite = conformance.Conformance(CONFIGS[name].replace(implementation=implementation))
    for check in CHECKS:
        with subtests.test(check):
            getattr(suite, check)()
