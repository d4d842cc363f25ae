"""`kvjax convert`, and conversions as variants of an ablation."""

import io
import json

import pytest
from rich.console import Console

import kvjax
from experiments.ablate import run_ablation
from experiments.cli import main
from experiments.configuration import AblationConfig
from experiments.conversions import ToGrouped, ToLatent
from experiments.rows import read_rows
from kvjax import CacheConfig
from kvjax.errors import ConfigError
from kvjax.language_model import LanguageModel


@pytest.fixture
def source(tiny, tmp_path, monkeypatch) -> str:
    """The tiny model on disk (its tokenizer is no file, so without)."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "")
    LanguageModel(**{**vars(tiny), "tokenizer": None}).save(tmp_path / "source")
    return str(tmp_path / "source")


def test_a_converted_model_is_saved_with_its_errors(source, tmp_path, capsys) -> None:
    out = tmp_path / "latent"
    command = ["convert", source, "--to", "latent", "--latent-dim", "24", "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "256 -> 224 bytes a cached token" in printed and "rotation dropped" in printed
    facts = json.loads((out / "conversion.json").read_text())
    assert facts["conversion"]["latent_dim"] == 24 and len(facts["layers"]) == 1
    assert kvjax.load(out).dims.fields == {"c": 24, "k_rope": 32}
    assert main(command) == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--to", "latent"], "needs --latent-dim"),
        (["--to", "grouped"], "needs --kv-heads"),
        (["--to", "grouped", "--kv-heads", "1", "--rope-dim", "4"], "--rope-dim has no meaning"),
        (["--to", "latent", "--latent-dim", "999"], "expected 1 to 32"),
        (["--to", "latent", "--latent-dim", "8", "--calibrate", "bible-web"], "no tokenizer"),
    ],
    ids=["no size", "no heads", "foreign", "too wide", "no tokenizer"],
)
def test_wrong_commands_say_so(source, tmp_path, capsys, options, words) -> None:
    assert main(["convert", source, *options, "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_conversions_are_variants_of_an_ablation(tiny, text_file, tmp_path) -> None:
    cache = CacheConfig()
    config = AblationConfig(
        text=str(text_file),
        num_tokens=40,
        chunk=40,
        repetitions=0,
        baseline="gqa",
        variants=dict.fromkeys(("gqa", "exact", "narrow", "mqa"), cache),
        conversions={
            "exact": ToLatent(latent_dim=32),
            "narrow": ToLatent(latent_dim=8, calibration=str(text_file), calibration_tokens=64),
            "mqa": ToGrouped(num_kv_heads=1),
        },
    )
    console = Console(file=io.StringIO(), width=160)
    assert run_ablation(config, tmp_path / "run", console=console, load=lambda *a, **k: tiny) == 0
    rows = {row["variant"]: row for row in read_rows(tmp_path / "run" / "rows.jsonl")}
    assert rows["exact"]["kl"] < 1e-6 < rows["narrow"]["kl"]
    assert rows["exact"]["changes"] == "model" and rows["gqa"]["conversion"] is None
    values = [rows[name]["payload_bytes"] // (40 * 4) for name in config.variants]
    assert values == [64, 64, 40, 32]
    assert "latent 8, rope all a head, calibrated" in (tmp_path / "run" / "report.md").read_text()


def test_conversions_of_what_is_no_variant_are_refused() -> None:
    variants = {"contiguous": CacheConfig(), "other": CacheConfig()}
    for label in ("contiguous", "third"):
        with pytest.raises(ConfigError, match=f"{label}.*not the baseline: other"):
            AblationConfig(variants=variants, conversions={label: ToGrouped(num_kv_heads=1)})
