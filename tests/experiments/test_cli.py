import io
import subprocess
import sys
import types
from pathlib import Path

import pytest

from experiments import environment
from experiments.cli import COMMANDS, main
from experiments.generate import UNFINISHED, Stream
from kvjax.cache.codecs import CODECS


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert "kvjax ablate configs/quickstart.py" in out
    assert main([]) == 0


@pytest.mark.parametrize("command", ["list", "ablate", "generate"])
def test_help_of_a_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"kvjax {command}" in capsys.readouterr().out.partition("Try th")[2]


@pytest.mark.parametrize(
    "argv", [["nothing"], ["ablate"], ["ablate", "quickstart", "--nothing"], ["list", "--out", "x"]]
)
def test_typing_errors_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err


def test_help_does_not_wait_for_jax() -> None:
    code = "import sys, experiments.cli as c; c.main(['--help']); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_list_shows_members_knobs_and_legality(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for word in ("paged", "page_size: int = 16", "sink_window", "unrotated_slot", "smollm2-135m"):
        assert word in out
    assert "none [1]" in out and "[1] rotated keys with slot positions" in out
    assert "quickstart.py" in out and "python-reference" in out


def test_ablate_runs_a_config_file(config_file, loader, tmp_path, capsys) -> None:
    argv = ["ablate", str(config_file), "--out", str(tmp_path / "run"), "--set", "repetitions=0"]
    argv += ["--set", "variants.int4.codec=int(bits=2)", "--implementation", "reference"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "contiguous" in out and "reference" in out
    page = (tmp_path / "run" / "report.md").read_text()
    assert "--set repetitions=0" in page and "int(bits=2)" in page


def test_ablate_writes_to_runs_by_default(config_file, loader, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["ablate", "tiny.py", "--set", "repetitions=0", "--set", "num_tokens=4"]
    assert main(argv) == 0
    assert (tmp_path / "runs" / "tiny" / "results.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--set", "variants.int5.slack=1"], "'int5'"),
        (["--set", "variants.int4.codec=int(bits=3)"], "bits=3"),
        (
            ["--set", "variants.int4.codec=float4"],
            f"unknown codec 'float4'; known: {', '.join(sorted(CODECS))}",
        ),
        (["--set", "variants.int4.positions=rotated_slot"], "rotated keys with slot positions"),
        (["--set", "text=nothing.txt"], "unknown text"),
        (["--set", "num_tokens=4000"], "tokens"),
        (["--implementation", "fast"], "unknown attention implementation 'fast'"),
        (["--out", "FILE/run"], "cannot write to"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments, part, config_file, loader, tmp_path, capsys
) -> None:
    (tmp_path / "FILE").write_text("")
    arguments = [a.replace("FILE", str(tmp_path / "FILE")) for a in arguments]
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "run")]
    assert main(["ablate", str(config_file), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvjax: error: ") and error.count("\n") == 1
    assert part in error
    assert not (tmp_path / "run" / "rows.jsonl").exists()


def test_an_unknown_model_is_one_line(config_file, tmp_path, capsys) -> None:
    argv = ["ablate", str(config_file), "--out", str(tmp_path / "run")]
    assert main(argv) == 2
    assert "unknown model 'tiny'" in capsys.readouterr().err


def test_an_interrupted_run_says_that_rows_are_kept(
    config_file, tmp_path, monkeypatch, capsys
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvjax.load", interrupted)
    assert main(["ablate", str(config_file), "--out", str(tmp_path / "run")]) == 130
    assert "rows are kept" in capsys.readouterr().err


def test_generate_streams_and_reports(loader, capsys) -> None:
    argv = ["generate", "The sea is", "--max-new-tokens", "5", "--cache", "codec=int(bits=4)"]
    assert main([*argv, "--cache", "layout=paged(page_size=4)"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("The sea is") and captured.out.endswith("\n")
    assert len(captured.out) == len("The sea is") + 5 + 1
    assert "paged(page_size=4) / int(bits=4)" in captured.err and "5 new" in captured.err


@pytest.mark.parametrize(
    ("cache", "part"),
    [
        ("codec", "must look like"),
        ("kodec=int", "'kodec'"),
        ("codec=int(bits=7)", "bits=7"),
        ("positions=rotated_slot", "rotated keys with slot positions"),
    ],
)
def test_generate_refuses_a_bad_cache(cache: str, part: str, loader, capsys) -> None:
    assert main(["generate", "The sea is", "--cache", cache]) == 2
    assert part in capsys.readouterr().err
    assert loader.calls == 0


def test_bench_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    stub = types.ModuleType("experiments.bench.main")
    stub.run = lambda argv: seen.append(argv) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "experiments.bench.main", stub)
    monkeypatch.setitem(sys.modules, "experiments.bench", types.ModuleType("experiments.bench"))
    assert main(["bench", "--help", "x"]) == 0
    assert seen == [["--help", "x"]]


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Settings that would be made, without making them."""
    found: dict[str, object] = {}
    monkeypatch.setattr(environment.jax.config, "update", found.__setitem__)
    return found


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"XDG_CACHE_HOME": "{tmp}/xdg"}, "xdg/kvjax/xla"),
        ({"HOME": "{tmp}/home", "XDG_CACHE_HOME": ""}, "home/.cache/kvjax/xla"),
        ({"JAX_COMPILATION_CACHE_DIR": "{tmp}/own"}, "own"),
    ],
    ids=["xdg", "home", "own"],
)
def test_programs_are_kept(variables, folder, updates, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    assert environment.enable_compilation_cache() is None
    assert updates["jax_compilation_cache_dir"] == str(tmp_path / folder)
    assert list((tmp_path / folder).iterdir()) == []


def test_a_folder_that_cannot_be_written_only_warns(updates, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "x"))
    warning = environment.enable_compilation_cache()
    assert warning and "\n" not in warning and "not kept" in warning
    assert not updates


def test_an_empty_variable_turns_it_off(updates) -> None:
    assert environment.enable_compilation_cache() is None
    assert not updates


def test_the_console_script_is_this_function() -> None:
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'kvjax = "experiments.cli:main"' in pyproject


def test_streaming_hides_the_end_of_the_text_and_half_characters(tiny) -> None:
    out = io.StringIO()
    stream = Stream(tiny, "", out)
    for token in (1, 2, tiny.eos_ids[0]):
        stream(0, token)
    assert out.getvalue() == tiny.tokenizer.decode([1, 2])
    stream._decode = lambda ids: "a" + UNFINISHED  # type: ignore[method-assign]
    stream(0, 3)
    assert out.getvalue() == tiny.tokenizer.decode([1, 2])
