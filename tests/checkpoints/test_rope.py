"""Rotary positions as config files state them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.rope import Rope, read_rope
from kvjax.errors import CheckpointError
from kvjax.nn.rotary import Linear, Llama3, PairFactors, Yarn

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 2, 3.0, 4.0],
    "long_factor": [5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": 16,
}


def read(
    scaling: dict[str, Any] | None, *, context_len: int | None = None, partial=False, **keys: Any
) -> Rope:
    values = {"max_position_embeddings": 64, "rope_scaling": scaling} | keys
    return read_rope(
        RawConfig(values, Path("config.json"), context_len), head_dim=8, partial=partial
    )


def fails(scaling: Any, *words: str, **keys: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(scaling, **keys)
    message = str(caught.value)
    assert all(word in message for word in ["config.json", *words]), message


class TestKinds:
    def test_default(self) -> None:
        rope = read(None)
        assert (rope.rotary.dims, rope.rotary.theta, rope.rotary.scaling) == (8, 1e4, None)
        assert (rope.max_len, rope.rotary.magnitude, rope.score_gain) == (64, 1.0, 1.0)

    def test_linear(self) -> None:
        assert read({"type": "linear", "factor": 2}).rotary.scaling == Linear(factor=2.0)

    def test_dynamic_is_settled_for_the_context(self) -> None:
        scaling = {"type": "dynamic", "factor": 2.0}
        for context_len in (None, 64, 10):
            assert read(scaling, context_len=context_len).rotary.theta == 1e4
        rope = read(scaling, context_len=128)
        assert rope.max_len == 128
        np.testing.assert_allclose(rope.rotary.theta, 1e4 * 3 ** (8 / 6))

    def test_llama3(self) -> None:
        factors = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        scaling = {"rope_type": "llama3", **factors, "original_max_position_embeddings": 16}
        assert read(scaling).rotary.scaling == Llama3(**factors, original_len=16)

    def test_yarn(self) -> None:
        rope = read(YARN)
        assert rope.rotary.scaling == Yarn(factor=4.0, original_len=16)
        assert rope.rotary.magnitude == 0.1 * math.log(4) + 1
        assert read(YARN | {"factor": None}) == rope  # 64 / 16
        assert read(YARN | {"attention_factor": 1.5}).rotary.magnitude == 1.5
        assert read(YARN | {"factor": 0.5}).rotary.magnitude == 1.0
        scaling = read(YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False}).rotary.scaling
        assert scaling == Yarn(
            factor=4.0, original_len=16, beta_fast=16.0, beta_slow=2.0, truncate=False
        )

    def test_yarn_of_deepseek(self) -> None:
        def share(weight: float) -> float:
            return 0.1 * weight * math.log(4) + 1

        rope = read(YARN | {"mscale": 0.8, "mscale_all_dim": 0.6})
        assert rope.rotary.magnitude == share(0.8) / share(0.6)
        assert rope.score_gain == share(0.6) ** 2
        assert read(YARN | {"mscale": 0.8}).rotary.magnitude == share(1)
        assert read(YARN | {"mscale_all_dim": 0}).score_gain == 1.0

    @pytest.mark.parametrize(
        ("context_len", "max_len", "long"),
        [(None, 16, False), (16, 16, False), (9, 9, False), (17, 17, True), (500, 500, True)],
    )
    def test_longrope(self, context_len: int | None, max_len: int, long: bool) -> None:
        rope = read(LONGROPE, context_len=context_len)
        factors = (5.0, 6.0, 7.0, 8.0) if long else (1.0, 2.0, 3.0, 4.0)
        assert rope.rotary.scaling == PairFactors(factors=factors)
        assert rope.max_len == max_len
        # Of the ratio that the file states, whatever the context is settled for.
        assert rope.rotary.magnitude == math.sqrt(1 + math.log(4) / math.log(16))

    def test_longrope_states_its_own_ratio(self) -> None:
        magnitude = read(LONGROPE | {"factor": 16.0}).rotary.magnitude
        assert magnitude == math.sqrt(1 + math.log(16) / math.log(16))
        assert read(LONGROPE | {"factor": 1.0}).rotary.magnitude == 1.0
        assert read(LONGROPE | {"attention_factor": 1.2}).rotary.magnitude == 1.2


class TestSpellings:
    @pytest.mark.parametrize("key", ["type", "rope_type"])
    def test_longrope_was_called_su(self, key: str) -> None:
        old = {name: value for name, value in LONGROPE.items() if name != "rope_type"}
        assert read(old | {key: "su"}) == read(LONGROPE)
        assert read(old | {"type": "su", "rope_type": "longrope"}) == read(LONGROPE)

    def test_the_original_context_beside_the_sizes(self) -> None:
        scaling = {key: value for key, value in LONGROPE.items() if not key.startswith("orig")}
        assert read(scaling, original_max_position_embeddings=16) == read(LONGROPE)
        assert read(LONGROPE, original_max_position_embeddings=16) == read(LONGROPE)
        fails(LONGROPE, "two different orig", "16 and 32", original_max_position_embeddings=32)
        # Where nothing is scaled it says nothing.
        assert read(None, original_max_position_embeddings=32) == read(None)

    def test_heads_turned_in_part(self) -> None:
        assert read(None, partial=True, partial_rotary_factor=0.75).rotary.dims == 6
        scaling = {"rope_type": "default", "partial_rotary_factor": 0.5}
        assert read(scaling, partial=True).rotary.dims == 4
        fails(scaling, "partial_rotary_factor=0.5", "not supported")
        fails(scaling, "two different partial", partial=True, partial_rotary_factor=0.75)
        fails({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5", partial=True)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "mrope"}, ["rotary type 'mrope'", "known: default, linear, dynamic"]),
        ({"rope_type": ["yarn"]}, ["rotary type ['yarn']"]),
        ({"type": "linear", "rope_type": "yarn"}, ["two different rope_type", "linear", "yarn"]),
        ({"type": "linear"}, ["factor is missing"]),
        ({"type": "linear", "factor": "2"}, ["factor='2'", "above 0"]),
        ({"type": "linear", "factor": -1.0}, ["factor=-1.0"]),
        ({"type": "linear", "factor": 2.0, "beta_fast": 3}, ["'linear'", "beta_fast"]),
        (YARN | {"finetuned": True}, ["'yarn'", "finetuned"]),
        (YARN | {"truncate": 1}, ["truncate=1", "true or false"]),
        (LONGROPE | {"short_factor": [1.0]}, ["short_factor", "a list of 4"]),
        (LONGROPE | {"long_factor": [1.0, 2.0, 3.0, 0.0]}, ["long_factor", "above 0"]),
        (LONGROPE | {"long_factor": None}, ["long_factor is missing"]),
        ("yarn", ["rope_scaling='yarn'", "an object"]),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value)[:40],
)
def test_what_is_not_understood_is_refused(scaling: Any, words: list[str]) -> None:
    fails(scaling, *words)


def test_the_context_must_be_stated() -> None:
    fails(None, "max_position_embeddings is missing", max_position_embeddings=None)


def test_yarn_makes_room_as_far_as_its_factor_reaches() -> None:
    """Files are told of yarn without a change of max_position_embeddings (Qwen's own advice)."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(scaling).max_len == 64
    assert read(scaling, context_len=200).max_len == 200
    assert read(scaling, context_len=300).max_len == 256  # then refused by the loader
