"""The folder of a run: rows that survive a kill, and a manifest that says what they belong to.

`rows.jsonl` gets one line as each variant finishes, in one write that is flushed to the disk. A
process that is killed in the middle of that write leaves a torn last line, which the next run cuts
off. A variant that was tried again has several lines; the last one counts.
"""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.configuration import differences
from kvjax.errors import ConfigError

try:
    import fcntl
except ImportError:  # no advisory locks here: two runs at once are the user's own affair
    fcntl = None

Row = dict[str, Any]

MANIFEST, ROWS, LOCK = "manifest.json", "rows.jsonl", ".lock"


class RunFolder:
    """Rows and manifest of one run, open for writing; build one with `open_run`."""

    def __init__(self, path: Path):
        self.path = path
        self._rows = read_rows(path / ROWS, repair=True)

    def latest(self) -> dict[str, Row]:
        """The newest row of each variant, in the order in which they were first tried."""
        return {row["variant"]: row for row in self._rows}

    def finished(self, variant: str) -> bool:
        """Whether a variant has a row with status "ok": it is never run again."""
        return self.latest().get(variant, {}).get("status") == "ok"

    def append(self, row: Row) -> None:
        """Add a row for good: once this returns, a crash cannot take it away."""
        line = json.dumps(plain(row), allow_nan=False) + "\n"
        descriptor = os.open(self.path / ROWS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            os.write(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._rows.append(json.loads(line))


@contextlib.contextmanager
def open_run(path: Path, config: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Open a run's folder for writing, a new one or one of the very same config.

    Args:
        path: the folder; made if it does not exist.
        config: flat config (`configuration.flatten`): what rows of one folder have in common.

    Raises:
        ConfigError: the folder is unwritable, in use by another run, damaged, or of another config.
    """
    _check_writable(path)
    with _locked(path):
        wanted = plain(config)
        manifest = path / MANIFEST
        # A start that came to nothing (a typo, a missing model) does not claim its folder.
        claimed = (path / ROWS).exists()
        if claimed and manifest.exists():
            changes = differences(_read_manifest(manifest), wanted)
            if changes:
                shown = "; ".join(changes[:3]) + (
                    f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
                )
                raise ConfigError(
                    f"{path} holds a run of another config ({shown}); "
                    f"use a new folder: --out {fresh_name(path)}"
                )
        elif claimed:
            raise ConfigError(f"{path} has rows but no {MANIFEST}; use --out {fresh_name(path)}")
        else:
            text = json.dumps({"config": wanted}, indent=1, allow_nan=False)
            write_atomically(manifest, text + "\n")
        yield RunFolder(path)


def read_rows(path: Path, *, repair: bool = False) -> list[Row]:
    """Read all complete rows; a torn last line is left out, and cut off if `repair`.

    Raises:
        ConfigError: a line that is no row, before the last.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    rows, end = [], 0
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        row = _parse_row(line)
        if row is None:
            if end + len(line) < len(content):
                raise ConfigError(f"{path}:{number}: no row of a run; mend the line or remove it")
            break
        rows.append(row)
        end += len(line)
    if repair and end < len(content):
        os.truncate(path, end)
    return rows


def _parse_row(line: bytes) -> Row | None:
    if not line.endswith(b"\n"):
        return None  # also if it parses: the next row would be glued to it
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "variant" in row and "status" in row else None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file by new content, entirely or not at all."""
    data = content.encode() if isinstance(content, str) else content
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".tmp-", delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def fresh_name(path: Path) -> Path:
    """A folder beside `path` that does not exist yet: runs/a -> runs/a-2."""
    number = 2
    while (candidate := path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return candidate


def plain(value: Any) -> Any:
    """Turn a value into plain JSON types; numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return plain(value.item()) if hasattr(value, "item") else str(value)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path} cannot be read; remove it with its rows, or use "
            f"--out {fresh_name(path.parent)}"
        ) from None
    return config


def _check_writable(path: Path) -> None:
    """Make the folder and try to write in it, before any work is done."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write to {path}: {error.strerror or error}; choose another folder with --out"
        ) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the folder for one run; the lock goes with the process, however that ends."""
    with open(path / LOCK, "w") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(
                    f"another run is writing to {path}; wait for it or use --out {fresh_name(path)}"
                ) from None
        yield


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
