import json
from pathlib import Path

import numpy as np
import pytest

from experiments.rows import fresh_name, open_run, plain, read_rows, write_atomically
from kvjax.errors import ConfigError

CONFIG = {"num_tokens": 8, "variants.a.bits": 4}


def row(variant: str, status: str = "ok", **figures: object) -> dict:
    return {"variant": variant, "status": status, **figures}


def test_rows_come_back(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", CONFIG) as folder:
        folder.append(row("a", kl=np.float32(0.5)))
        folder.append(row("b", "failed"))
        folder.append(row("b"))
        assert folder.finished("b")
    assert [r["status"] for r in read_rows(tmp_path / "run" / "rows.jsonl")] == [
        "ok",
        "failed",
        "ok",
    ]
    with open_run(tmp_path / "run", CONFIG) as folder:
        assert list(folder.latest()) == ["a", "b"]
        assert folder.latest()["a"]["kl"] == 0.5
        assert not folder.finished("c")


@pytest.mark.parametrize("torn", ['{"variant": "b", "sta', '{"variant": "b", "status": "ok"}', "{"])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: str) -> None:
    with open_run(tmp_path, CONFIG) as folder:
        folder.append(row("a"))
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write(torn)
    assert [r["variant"] for r in read_rows(tmp_path / "rows.jsonl")] == ["a"]
    with open_run(tmp_path, CONFIG) as folder:
        assert not folder.finished("b")
        folder.append(row("b"))
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["variant"] for line in lines] == ["a", "b"]


def test_damage_before_the_last_line_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"variant": "a", "status": "ok"}\nnonsense\n{"variant": "b", "status": "ok"}\n'
    )
    with pytest.raises(ConfigError, match=r"rows.jsonl:2"):
        read_rows(path)


def test_another_config_is_refused_with_what_changed(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", CONFIG) as folder:
        folder.append({"variant": "a", "status": "ok"})
    changed = {"num_tokens": 8, "variants.a.bits": 2, "variants.b": "CacheConfig"}
    with pytest.raises(ConfigError) as caught, open_run(tmp_path / "run", changed):
        pass
    message = str(caught.value)
    assert "variants.a.bits: 4 -> 2" in message
    assert "variants.b: nothing -> 'CacheConfig'" in message
    assert f"--out {tmp_path / 'run-2'}" in message


def test_rows_without_a_manifest_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(ConfigError, match="no manifest"), open_run(tmp_path, CONFIG):
        pass


def test_a_start_that_came_to_nothing_does_not_claim_its_folder(tmp_path: Path) -> None:
    with open_run(tmp_path, {"model": "smollm3"}):
        pass
    with open_run(tmp_path, CONFIG) as folder:
        folder.append({"variant": "a", "status": "ok"})
    with open_run(tmp_path, CONFIG) as folder:
        assert folder.finished("a")


def test_a_broken_manifest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(ConfigError, match="cannot be read"), open_run(tmp_path, CONFIG):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"), open_run(tmp_path / "file/x", CONFIG):
        pass


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    # The lock belongs to an open file: a second opening is refused in one process as in two.
    with (
        open_run(tmp_path, CONFIG),
        pytest.raises(ConfigError, match="another run"),
        open_run(tmp_path, CONFIG),
    ):
        pass
    with open_run(tmp_path, CONFIG) as folder:
        assert not folder.latest()


def test_atomic_writes_leave_no_litter(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", "one")
    write_atomically(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_text() == "two"
    with pytest.raises(OSError):
        write_atomically(tmp_path, "a folder is in the way")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_plain_gives_json() -> None:
    value = plain({"a": np.float32(1.5), "b": (float("nan"), np.int64(3)), 4: Path("x"), "c": None})
    assert json.loads(json.dumps(value)) == {"a": 1.5, "b": [None, 3], "4": "x", "c": None}


def test_fresh_name_skips_what_exists(tmp_path: Path) -> None:
    (tmp_path / "run-2").mkdir()
    assert fresh_name(tmp_path / "run") == tmp_path / "run-3"
