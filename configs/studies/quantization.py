"""Bits against quality: every codec on SmolLM2 and 4,096 tokens of the Python reference.

    kvjax ablate configs/studies/quantization.py

About 8 minutes on 2 CPU cores (docs/results/quantization.md). Perplexity is 11.70 with the exact
cache (CPython 3.11) and then, times that: 1.000 for int8, 1.003 for KIVI at 4 bits and 1.06 for
int4 by token, 1.01 for float8, 1.09 for hadamard4; at 2 bits 1.36 with keys by channel, 8 by token.
"""

from experiments.configuration import AblationConfig
from kvjax import KIVI, CacheConfig, Codecs, Float8, Hadamard, Int


def get_config() -> AblationConfig:
    """One codec a row; values are encoded like keys unless the label says otherwise."""
    codecs = {
        "int8": Int(bits=8),
        "float8-e4m3": Float8(),
        "float8-e5m2": Float8(format="e5m2"),
        "int4": Int(bits=4),
        "int4-channel-keys": Codecs(k=Int(bits=4, axis="channel"), v=Int(bits=4)),
        "kivi4": KIVI(bits=4),
        "hadamard4": Hadamard(bits=4),
        "hadamard4-keys-int4": Codecs(k=Hadamard(bits=4), v=Int(bits=4)),
        "int2": Int(bits=2),
        "int2-channel-keys": Codecs(k=Int(bits=2, axis="channel"), v=Int(bits=2)),
        "kivi2": KIVI(bits=2),
        "hadamard2": Hadamard(bits=2),
    }
    base = CacheConfig()
    return AblationConfig(
        model="smollm2-135m",
        text="python-reference:execmodel+types",
        num_tokens=4096,
        repetitions=0,
        variants={
            "contiguous": base,
            **{label: base.replace(codec=codec) for label, codec in codecs.items()},
        },
    )
