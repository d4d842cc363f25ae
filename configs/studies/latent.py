"""What a token costs in the cache of MHA, GQA, MQA and MLA, and what SmolLM2 loses by each.

kvjax ablate configs/studies/latent.py
"""

from experiments.configuration import AblationConfig
from experiments.conversions import Conversion, ToGrouped, ToLatent
from kvjax import CacheConfig, Int


def get_config() -> AblationConfig:
    """SmolLM2 as it is (GQA), and converted."""
    raw, int8 = CacheConfig(), CacheConfig(codec=Int(bits=8))
    calibration = "bible-web"
    conversions: dict[str, Conversion] = {
        "mha": ToGrouped(num_kv_heads=9),
        "mqa-pooled": ToGrouped(num_kv_heads=1),
        "mla192-rope64": ToLatent(latent_dim=192),
        "mla160-rope64-weights": ToLatent(latent_dim=160),
    }
    for latent_dim, rope_dim in ((176, 64), (160, 64), (128, 64), (288, 32), (192, 32)):
        conversions[f"mla{latent_dim}-rope{rope_dim}"] = ToLatent(
            latent_dim=latent_dim, rope_dim=rope_dim, calibration=calibration
        )
    conversions["mla160-rope64-int8"] = conversions["mla160-rope64"]
    return AblationConfig(
        model="smollm2-135m",
        text="python-reference:execmodel+types",
        num_tokens=1024,
        repetitions=0,
        baseline="gqa",
        conversions=conversions,
        variants={
            "gqa": raw,
            "gqa-int8": int8,
            **{label: int8 if label.endswith("int8") else raw for label in conversions},
        },
    )
