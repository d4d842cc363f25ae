"""The safetensors files of a folder, checked as a set before anything is read."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from kvjax.checkpoints.checkpoint import one_line
from kvjax.errors import CheckpointError

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED_TYPES = ("F32", "F16", "BF16", "F64")


class SafetensorsFiles:
    """One file, or several with an index; they must agree with each other.

    Attributes:
      shapes: Of every tensor.
    """

    def __init__(self, folder: Path, ignored: str | None = None):
        """Read the headers.

        Args:
          folder: Holds the files.
          ignored: Pattern of tensors that are passed over.

        Raises:
          CheckpointError: A file is missing, cut or contradicts another one, or a tensor is stored
            in a type that cannot be read.
        """
        self._file_of: dict[str, Path] = {}
        self._ignored = None if ignored is None else re.compile(ignored)
        self.shapes: dict[str, tuple[int, ...]] = {}
        index_path = folder / _INDEX
        listed: Any = {}
        if (folder / _SINGLE).is_file():
            paths = [folder / _SINGLE]
        elif index_path.is_file():
            listed = read_json(index_path).get("weight_map")
            if not isinstance(listed, dict) or not listed:
                raise CheckpointError(f"{index_path}: weight_map is missing or empty")
            paths = [folder / name for name in dict.fromkeys(map(str, listed.values()))]
        else:
            paths = sorted(folder.glob("*.safetensors"))
            if not paths:
                raise CheckpointError(f"{folder}: no safetensors file ({_SINGLE} or {_INDEX})")
            paths += _absent_siblings(paths)
        for path in paths:
            self._add(path)
        for name, shard in listed.items():
            if not self._passed_over(name) and self._file_of.get(name) != folder / str(shard):
                raise CheckpointError(f"{folder / str(shard)}: tensor {name} is missing")

    def _passed_over(self, name: str) -> bool:
        # A buffer of old savers, computed from the config, and what the family leaves out.
        return name.endswith("rotary_emb.inv_freq") or (
            self._ignored is not None and self._ignored.match(name) is not None
        )

    def _add(self, path: Path) -> None:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if self._passed_over(name):
                    continue
                if name in self._file_of:
                    raise CheckpointError(
                        f"{path}: tensor {name} is in {self._file_of[name].name} as well"
                    )
                stored = file.get_slice(name)
                if stored.get_dtype() not in _STORED_TYPES:
                    raise CheckpointError(
                        f"{path}: tensor {name} is stored as {stored.get_dtype()}, which is "
                        "quantized or packed; save the weights unquantized first; "
                        f"known: {', '.join(_STORED_TYPES)}"
                    )
                self._file_of[name] = path
                self.shapes[name] = tuple(stored.get_shape())

    def read(self, name: str) -> np.ndarray:
        """Return a tensor. The file is mapped only meanwhile, so that its pages do not add up."""
        with _open(self._file_of[name]) as file:
            return file.get_tensor(name)

    def drop_tied(self, name: str, other: str) -> None:
        """Leave out a matrix that some savers write twice, after a look that it is the same."""
        if self.shapes.pop(name, None) is None or other not in self._file_of:
            return  # what is missing is found by the complete check
        if not np.array_equal(self.read(name), self.read(other)):
            raise CheckpointError(
                f"{self._file_of[name]}: tie_word_embeddings is true "
                f"but {name} differs from {other}"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
      CheckpointError: It is missing or damaged; the message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def _open(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the checkpoint is incomplete")
    try:
        return safetensors.safe_open(str(path), framework="numpy")
    except Exception as error:  # SafetensorError derives from Exception alone
        raise CheckpointError(f"{path}: {_damage(path) or one_line(error)}") from None


def _damage(path: Path) -> str | None:
    """Return which tensor a cut safetensors file lacks, if its header can still be read."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        total = path.stat().st_size
        ends = {
            name: 8 + length + entry["data_offsets"][1]
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except Exception:
        return None  # the header is damaged as well; the library's own message has to do
    cut = next((name for name, end in ends.items() if end > total), None)
    if cut is None:
        return None
    return f"tensor {cut} ends at byte {ends[cut]}, the file at byte {total}; copy it again"


def _absent_siblings(paths: list[Path]) -> list[Path]:
    """Return the first shard that names like model-00001-of-00003 promise and the folder lacks."""
    present = set(paths)
    for path in paths:
        numbered = re.fullmatch(r"(.*-)(\d{1,9})(-of-)(\d{1,9})(\.safetensors)", path.name)
        if numbered is None:
            continue
        stem, digits, of, total, suffix = numbered.groups()
        # Of more numbers than there are files one is missing early.
        for i in range(1, int(total) + 1):
            sibling = path.with_name(f"{stem}{i:0{len(digits)}d}{of}{total}{suffix}")
            if sibling not in present:
                return [sibling]
    return []
