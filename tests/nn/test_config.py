import dataclasses
from typing import Any

import pytest

from kvjax.errors import ConfigError
from kvjax.nn.config import MoEConfig, RouterConfig, TransformerConfig
from kvjax.nn.rotary import RotaryConfig

SIZES: dict[str, Any] = {
    "vocab_size": 49_152,
    "num_layers": 30,
    "d_model": 576,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "d_ff": 1536,
    "max_len": 8192,
}


def test_parameter_count_of_a_known_model() -> None:
    tied = TransformerConfig.llama(**SIZES, tie_embeddings=True)
    assert tied.parameter_count == 134_515_008
    untied = dataclasses.replace(tied, tie_embeddings=False)
    assert untied.parameter_count - tied.parameter_count == 49_152 * 576


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"num_layers": -1}, "num_layers=-1"),
        ({"d_model": 576.0}, r"d_model=576\.0"),
        ({"d_ff": True}, "d_ff=True"),
        ({"max_len": "8k"}, "max_len='8k'"),
        ({"num_kv_heads": 2}, "num_heads=9.*num_kv_heads=2"),
        ({"head_dim": 63}, "dims=63.*head_dim"),
        ({"rope_theta": 0.0}, r"theta=0\.0"),
        ({"norm_eps": float("nan")}, "norm_eps=nan"),
        ({"tie_embeddings": None}, "tie_embeddings=None"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_impossible_sizes_are_refused(change: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TransformerConfig.llama(**SIZES | change)


def test_groups_of_one_expert_have_no_best_two() -> None:
    router = RouterConfig(num_groups=8, groups_per_token=8, group_score="top2")
    with pytest.raises(ConfigError, match="no two experts"):
        MoEConfig(num_experts=8, experts_per_token=2, d_ff=4, router=router)


@pytest.mark.parametrize("change", [{"dims": 1 << 33}, {"theta": 1e-300}])
def test_impossible_rotary_positions_are_refused_at_once(change: dict) -> None:
    with pytest.raises(ConfigError, match="rotary"):
        RotaryConfig(**{"dims": 8} | change)
