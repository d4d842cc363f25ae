import csv
import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from experiments import measure
from experiments.ablate import run_ablation
from experiments.rows import read_rows
from kvjax import CacheConfig, Int, Paged
from kvjax.errors import CapacityError, ConfigError
from kvjax.evaluation import perplexity

FILES = ["quality.png", "quality.svg", "report.md", "results.csv", "speed.png", "speed.svg"]
COLUMNS = {
    *("variant", "status", "error", "bytes_per_token", "cache_bytes", "payload_bytes"),
    *("scales_bytes", "tail_bytes", "metadata_bytes", "tables_bytes", "padding_bytes"),
    *("effective_bits", "perplexity", "perplexity_ratio", "kl", "top1_agreement"),
    *("greedy_divergence", "prefill_tokens_per_s", "decode_tokens_per_s", "compile_s"),
    *("implementation", "seed", "text", "model_fingerprint", "device", "threads"),
    *("versions.python", "versions.jax", "versions.kvjax"),
}


def run(config, out: Path) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=160)
    code = run_ablation(config, out, console=console, command="kvjax ablate tiny.py")
    return code, console.file.getvalue()


def rows_of(out: Path) -> list[dict]:
    return read_rows(out / "rows.jsonl")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny, text_file):
    """A finished run: its config, its folder and what it printed."""
    from experiments.configuration import AblationConfig
    from kvjax import Window

    out = tmp_path_factory.mktemp("runs") / "tiny"
    config = AblationConfig(
        model="tiny",
        text=str(text_file),
        num_tokens=40,
        chunk=16,
        prompt_tokens=16,
        new_tokens=4,
        batch=2,
        repetitions=1,
        variants={
            "contiguous": CacheConfig(),
            "paged": CacheConfig(layout=Paged(page_size=4)),
            "int4": CacheConfig(codec=Int(bits=4)),
            "window": CacheConfig(policy=Window(window=8)),
        },
    )
    console = Console(file=io.StringIO(), width=160)
    code = run_ablation(
        config, out, console=console, command="kvjax ablate tiny.py", load=lambda *a, **k: tiny
    )
    assert code == 0
    return config, out, console.file.getvalue()


def test_a_run_leaves_rows_a_table_a_page_and_plots(finished) -> None:
    config, out, printed = finished
    assert (
        sorted(p.name for p in out.iterdir() if p.suffix in (".png", ".svg", ".md", ".csv"))
        == FILES
    )
    with open(out / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [row["variant"] for row in table] == list(config.variants)
    assert table[0].keys() >= COLUMNS
    page = (out / "report.md").read_text()
    assert "kvjax ablate tiny.py" in page
    assert "![quality](quality.png)" in page and "![speed](speed.png)" in page
    assert all(f"| {label} |" in page for label in config.variants)
    assert "[1/4] contiguous: " in printed and " left" in printed
    assert all(str(out / name) in printed for name in FILES)


def test_the_figures_of_a_run_make_sense(finished, tiny) -> None:
    config, out, _ = finished
    rows = {row["variant"]: row for row in rows_of(out)}
    exact, paged, int4, window = (rows[k] for k in ("contiguous", "paged", "int4", "window"))
    text = tiny.tokenizer.encode(Path(config.text).read_text())[:40]
    nll = -tiny.log_likelihood([text])
    assert exact["perplexity"] == pytest.approx(perplexity(nll), rel=1e-4)
    assert exact["kl"] == 0 and exact["top1_agreement"] == 1 and exact["perplexity_ratio"] == 1
    assert exact["greedy_divergence"] == paged["greedy_divergence"] == config.new_tokens
    assert paged["kl"] < 1e-6 < int4["kl"] < window["kl"]
    assert exact["payload_bytes"] == 2 * (16 + 16) * 40 * 4
    assert exact["bytes_per_token"] == exact["cache_bytes"] / 40
    assert int4["bytes_per_token"] < exact["bytes_per_token"]
    assert (exact["effective_bits"], int4["effective_bits"]) == (32, 6)
    assert exact["speed_cache_bytes"] == exact["cache_bytes"] * config.batch
    assert (exact["changes"], paged["changes"], int4["changes"]) == ("nothing", "layout", "codec")
    for row in rows.values():
        lines = ("payload", "scales", "tail", "metadata", "tables", "padding")
        assert sum(row[f"{line}_bytes"] for line in lines) == row["cache_bytes"]
        assert row["implementation"] == "xla" and row["model_fingerprint"] == tiny.fingerprint
        assert row["prefill_tokens_per_s"] > 0 and row["decode_tokens_per_s"] > 0


def test_a_finished_run_only_writes_its_report(finished, loader) -> None:
    config, out, _ = finished
    before = (out / "rows.jsonl").read_bytes()
    (out / "report.md").unlink()
    code, printed = run(config, out)
    assert code == 0 and loader.calls == 0
    assert "are there already" in printed
    assert (out / "rows.jsonl").read_bytes() == before
    assert (out / "report.md").exists()


def test_a_killed_run_goes_on_where_it_was(finished, loader, tmp_path) -> None:
    config, done, _ = finished
    out = tmp_path / "killed"
    out.mkdir()
    (out / "manifest.json").write_bytes((done / "manifest.json").read_bytes())
    lines = (done / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (out / "rows.jsonl").write_bytes(b"".join(lines[:2]) + lines[2][:50])
    code, printed = run(config, out)
    assert code == 0 and loader.calls == 1
    assert [row["variant"] for row in rows_of(out)] == list(config.variants)
    assert "[2/2] window" in printed and "contiguous:" not in printed
    was, now = rows_of(done)[2], rows_of(out)[2]
    assert (
        was["kl"] == pytest.approx(now["kl"])
        and was["greedy_divergence"] == now["greedy_divergence"]
    )


def test_a_changed_config_is_refused(finished, loader) -> None:
    config, out, _ = finished
    with pytest.raises(ConfigError, match=r"num_tokens: 40 -> 39.*--out"):
        run(config.replace(num_tokens=39), out)
    assert loader.calls == 0


def test_a_changed_text_is_refused(config, loader, tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(Path(config.text).read_text())
    config = config.replace(text=str(text), variants={"contiguous": CacheConfig()}, repetitions=0)
    assert run(config, tmp_path / "out")[0] == 0
    text.write_text("Another text altogether. " * 9)
    with pytest.raises(ConfigError, match="text_sha256"):
        run(config, tmp_path / "out")


def test_other_weights_are_refused(config, loader, tmp_path, break_variant, monkeypatch) -> None:
    break_variant(config.variants["int4"], "no room")
    assert run(config.replace(repetitions=0), tmp_path)[0] == 1
    loader.lm = dataclasses.replace(loader.lm, params=loader.lm.params, name="same weights")
    monkeypatch.setitem(loader.lm.__dict__, "fingerprint", "other")
    with pytest.raises(ConfigError, match="other weights"):
        run(config.replace(repetitions=0), tmp_path)


def test_a_failing_variant_is_a_row_and_the_others_go_on(
    config, loader, tmp_path, break_variant
) -> None:
    out = tmp_path / "run"
    break_variant(config.variants["int4"], "no room\nfor it")
    code, printed = run(config.replace(repetitions=0), out)
    assert code == 1
    assert "int4: failed: MemoryError: no room for it" in printed
    rows = {row["variant"]: row for row in rows_of(out)}
    assert [rows[k]["status"] for k in config.variants] == ["ok", "failed", "ok"]
    assert rows["int4"]["error"] == "MemoryError: no room for it"
    assert rows["int4"]["cache_bytes"] > 0 and "Traceback" in rows["int4"]["traceback"]
    assert "int4: MemoryError: no room for it" in (out / "report.md").read_text()
    assert "speed.png" not in (p.name for p in out.iterdir())


def test_a_failed_variant_is_tried_again(
    config, loader, tmp_path, break_variant, monkeypatch
) -> None:
    config = config.replace(repetitions=0)
    right = measure.measure_quality
    break_variant(config.variants["int4"], "no room")
    assert run(config, tmp_path)[0] == 1
    monkeypatch.setattr(measure, "measure_quality", right)
    assert run(config, tmp_path)[0] == 0
    assert [row["variant"] for row in rows_of(tmp_path)] == ["contiguous", "int4", "window", "int4"]
    table = list(csv.DictReader(io.StringIO((tmp_path / "results.csv").read_text())))
    assert [(r["variant"], r["status"]) for r in table] == [(k, "ok") for k in config.variants]


def test_without_a_baseline_nothing_is_compared(config, loader, tmp_path, break_variant) -> None:
    break_variant(config.variants["contiguous"], "no room")
    assert run(config.replace(repetitions=0), tmp_path)[0] == 1
    errors = {row["variant"]: row["error"] for row in rows_of(tmp_path)}
    assert errors["int4"] == "RuntimeError: nothing to compare with: contiguous failed"


def test_the_baseline_runs_first(config, loader, tmp_path) -> None:
    variants = dict(reversed(config.variants.items()))
    assert run(config.replace(variants=variants, repetitions=0), tmp_path)[0] == 0
    assert [row["variant"] for row in rows_of(tmp_path)] == ["contiguous", "window", "int4"]


def test_long_texts_run_the_exact_cache_along(config, loader, tmp_path, monkeypatch) -> None:
    config = config.replace(repetitions=0)
    run(config, tmp_path / "kept")
    monkeypatch.setattr(measure, "MAX_KEPT_BYTES", 0)
    run(config, tmp_path / "along")
    for kept, along in zip(rows_of(tmp_path / "kept"), rows_of(tmp_path / "along"), strict=True):
        assert kept["kl"] == pytest.approx(along["kl"], rel=1e-5)


def test_scores_count_from_the_position_asked_for(config, loader, tmp_path, tiny) -> None:
    only = config.replace(variants={"contiguous": CacheConfig()}, repetitions=0, score_from=30)
    run(only, tmp_path)
    text = tiny.tokenizer.encode(Path(config.text).read_text())[:40]
    expected = perplexity(-tiny.log_likelihood([text]), start=30)
    assert rows_of(tmp_path)[0]["perplexity"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "error", "part"),
    [
        ({"num_tokens": 5000}, ConfigError, "has 264 tokens"),
        ({"text_start": 250}, ConfigError, "text_start=250"),
        ({"new_tokens": 1}, ConfigError, "new_tokens=1"),
        ({"prompt_tokens": 5000}, CapacityError, "variant contiguous: .*4096 positions"),
    ],
)
def test_what_cannot_run_is_refused_before_any_work(
    config, loader, tmp_path, changes, error, part, monkeypatch
) -> None:
    if "num_tokens" in changes:
        monkeypatch.setattr(measure, "validate", lambda *_: None)
    with pytest.raises(error, match=part):
        run(config.replace(**changes), tmp_path)
    assert not (tmp_path / "rows.jsonl").exists()


def test_an_unknown_implementation_is_refused(config, loader, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"'fast'; known: auto"):
        run(config.with_implementation("fast"), tmp_path)


def test_rows_are_strict_json(finished) -> None:
    _, out, _ = finished

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for line in (out / "rows.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
