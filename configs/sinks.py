"""The sink effect: a window that forgets the first tokens hurts, keeping four of them heals.

    kvjax ablate configs/sinks.py

About a minute on 2 CPU cores. Perplexity of positions 300 to 2,047 (CPython 3.11): 11.0 with the
full cache, 20.5 with a window of 256, 12.6 with 4 sinks and 252 recent tokens, in either position
rule. The effect is arXiv 2309.17453's; on a model of this size it is a factor, not an explosion.
"""

from experiments.configuration import AblationConfig
from kvjax import CacheConfig, SinkWindow, Window


def get_config() -> AblationConfig:
    """A cache of 256 tokens in three forms against one that keeps everything."""
    full = CacheConfig()
    sinks = SinkWindow(sinks=4, window=252)
    return AblationConfig(
        model="smollm2-135m",
        text="python-reference:execmodel+types",
        num_tokens=2048,
        score_from=300,
        repetitions=0,
        baseline="full",
        variants={
            "full": full,
            "window256": full.replace(policy=Window(window=256)),
            "sinks4+252": full.replace(policy=sinks),
            "sinks4+252-slots": full.replace(policy=sinks, positions="unrotated_slot"),
        },
    )
