"""kvjax's own checkpoints: bit-exact, dtypes kept, and clear errors."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import kvjax
from kvjax.checkpoints.configs_as_json import from_json, to_json
from kvjax.checkpoints.native import FACTS
from kvjax.errors import CheckpointError, ConfigError
from kvjax.language_model import LanguageModel
from kvjax.testing.tiny import tiny_lm

FIXTURES = Path(__file__).parents[1] / "fixtures" / "models"


@pytest.fixture(scope="module")
def small() -> LanguageModel:
    return dataclasses.replace(
        tiny_lm(dtype="bfloat16", num_layers=1), tokenizer=None, name="small"
    )


@pytest.fixture
def saved(small, tmp_path) -> Path:
    small.save(tmp_path / "model")
    return tmp_path / "model"


def test_bits_dtypes_config_and_name_come_back(small, saved):
    again = kvjax.load(saved)
    assert (again.config, again.name, again.eos_ids) == (small.config, small.name, small.eos_ids)
    assert again.fingerprint == small.fingerprint
    for x, y in zip(jax.tree.leaves(small.params), jax.tree.leaves(again.params), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_the_config_of_every_family_survives_json(name):
    config = kvjax.load(FIXTURES / name).config
    assert from_json(json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.real_model
def test_the_tokenizer_comes_back(smollm2, tmp_path):
    lm = tiny_lm(vocab_size=smollm2.config.vocab_size, num_layers=1, d_model=4)
    whole = dataclasses.replace(lm, tokenizer=smollm2.tokenizer)
    whole.save(tmp_path / "model")
    again = kvjax.load(tmp_path / "model").tokenizer
    text = "In 2026, <|im_end|> naïve\n\ttokens"
    assert again is not None
    assert again.encode(text) == smollm2.tokenizer.encode(text)
    assert again.chat("Who?") == smollm2.tokenizer.chat("Who?")


def test_what_differs_is_named(small, saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"saved in bfloat16, asked for was float32"):
        kvjax.load(saved, dtype="float32")
    with pytest.raises(ConfigError, match="context_len"):
        kvjax.load(saved, context_len=64)
    with pytest.raises(CheckpointError, match="exists"):
        small.save(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda facts: facts["config"].update(d_model=32),
            r"embed/embedding.*\[97, 64\].*\[97, 32",
        ),
        (lambda facts: facts["arrays"].pop("params/norm/scale"), "params/norm/scale is missing"),
        (lambda facts: facts["config"].update(colour=1), "colour"),
        (lambda facts: facts["config"]["norm"].update({"class": "LayerNorm"}), "'LayerNorm'"),
        (lambda facts: facts.update(format=99), "format 99"),
        (lambda facts: facts.pop("config"), "damaged"),
        (lambda facts: facts["config"].update(norm=None), "damaged"),
        (lambda facts: facts.update(config=facts["config"]["norm"]), "NormConfig"),
        (lambda facts: facts.update(eos_ids=[-5]), "eos_ids"),
        (lambda facts: facts["config"]["layers"][0]["rotary"].update(dims=1 << 40), "rotary dims"),
    ],
    ids=[
        "shape", "missing", "field", "class", "format", "damaged", "null", "other", "ids", "huge",
    ],
)  # fmt: skip
def test_a_damaged_folder_is_refused(saved, change, words):
    facts = json.loads((saved / FACTS).read_text())
    change(facts)
    (saved / FACTS).write_text(json.dumps(facts))
    with pytest.raises(CheckpointError, match=words):
        kvjax.load(saved)


def test_a_save_that_fails_leaves_nothing(small, tmp_path):
    broken = dataclasses.replace(small, tokenizer=object())
    with pytest.raises(AttributeError):
        broken.save(tmp_path / "model")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "model", tmp_path / ("n" * 300)):
        with pytest.raises(CheckpointError, match="cannot be made"):
            small.save(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_an_unknown_dtype_is_refused(saved):
    for dtype in ("foo", 5):
        with pytest.raises(ConfigError, match="is not offered"):
            kvjax.load(saved, dtype=dtype)


def test_an_interrupted_save_is_refused(saved):
    (saved / FACTS).unlink()
    with pytest.raises(CheckpointError, match="no complete saved model"):
        kvjax.load(saved)


def test_cut_and_missing_files_are_refused_before_they_are_read(saved):
    files = [path for path in (saved / "params").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"has {len(content) // 2} bytes, {len(content)}"):
        kvjax.load(saved)
    largest.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        kvjax.load(saved)
