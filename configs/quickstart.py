"""Eleven caches under SmolLM2-135M on 1,024 tokens of the Python language reference.

    kvjax ablate configs/quickstart.py

Under 6 minutes on 2 CPU cores, most of it compilation; some 2 minutes where the programs are in the
compilation cache, seconds if all rows are there. Perplexity is 12.99 with the exact cache
(CPython 3.11; the text differs a little between versions) and then, times that:

    paged16             1.00    the same logits from pages in shuffled order
    int8                1.00    9 bits a value, KL 0.0002
    int4                1.06    5 bits a value; with keys by channel 1.005 for the same bits
    int2-channel-keys   1.30    3 bits a value
    window256           1.6     the first tokens are gone, and with them the attention sinks
    sinks4+252          1.07    four of them are kept; the same with positions in the cache
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
    """One base, and variants around it."""
    base = CacheConfig()
    int4 = Int(bits=4)
    int4_keys = Codecs(k=Int(bits=4, axis="channel"), v=int4)
    int2_keys = Codecs(k=Int(bits=2, axis="channel"), v=Int(bits=2))
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
            "int4-channel-keys": base.replace(codec=int4_keys),
            "int2-channel-keys": base.replace(codec=int2_keys),
            "window256": base.replace(policy=Window(window=256)),
            "sinks4+252": base.replace(policy=SinkWindow(sinks=4, window=252)),
            "sinks4+252-slots": base.replace(
                policy=SinkWindow(sinks=4, window=252), positions="unrotated_slot"
            ),
            "paged16-int8": base.replace(layout=Paged(page_size=16), codec=Int(bits=8)),
            "int4-raw-ends": LayerPattern(base.replace(codec=int4), raw_ends),
        },
    )
