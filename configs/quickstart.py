"""Eleven caches under SmolLM2-135M on 1,024 tokens of the Python language reference.

kvjax ablate configs/quickstart.py
"""

from experiments.configuration import AblationConfig
from kvjax import (
    CacheConfig,
    Codecs,
    Int,
    LayerPattern,
    Paged,
    SinkWindow,
    Window,
)


def get_config() -> AblationConfig:
    """One base, and variants that each change one thing (the last two change two)."""
    base = CacheConfig()
    int4 = Int(bits=4)
    int4_keys = Int(bits=4, axis="channel")
    int2_keys = Int(bits=2, axis="channel")
    raw_ends = {0: base, 1: base, -2: base, -1: base}
    return AblationConfig(
        model="smollm2-135m",
        text="python-reference:execmodel+types",
        num_tokens=1024,
        prompt_tokens=512,
        new_tokens=48,
        repetitions=2,
        variants={
            "contiguous": base,
            "paged16": base.replace(layout=Paged(page_size=16)),
            "int8": base.replace(codec=Int(bits=8)),
            "int4": base.replace(codec=int4),
            "int4-channel-keys": base.replace(codec=Codecs(k=int4_keys, v=int4)),
            "int2-channel": base.replace(codec=int2_keys),
            "window256": base.replace(policy=Window(window=256)),
            "sinks4+252": base.replace(policy=SinkWindow(sinks=4, window=252)),
            "sinks4+252-slots": base.replace(
                policy=SinkWindow(sinks=4, window=252), positions="unrotated_slot"
            ),
            "paged16-int8": base.replace(layout=Paged(page_size=16), codec=Int(bits=8)),
            "int4-raw-ends": LayerPattern(base.replace(codec=int4), raw_ends),
        },
    )
