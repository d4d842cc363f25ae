"""Read a Llama model from a Hugging Face folder: config.json, safetensors, tokenizer.json."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from kvjax.checkpoints.checkpoint import (
    Checkpoint,
    TensorNames,
    assemble_params,
    check_tensors,
    one_line,
    resolve_dtype,
)
from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.errors import CheckpointError, ConfigError
from kvjax.nn.config import TransformerConfig

_NAMES = TensorNames(
    embedding="model.embed_tokens.weight",
    attention_norm="model.layers.{i}.input_layernorm.weight",
    q="model.layers.{i}.self_attn.q_proj.weight",
    k="model.layers.{i}.self_attn.k_proj.weight",
    v="model.layers.{i}.self_attn.v_proj.weight",
    out="model.layers.{i}.self_attn.o_proj.weight",
    mlp_norm="model.layers.{i}.post_attention_layernorm.weight",
    gate="model.layers.{i}.mlp.gate_proj.weight",
    up="model.layers.{i}.mlp.up_proj.weight",
    down="model.layers.{i}.mlp.down_proj.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED_TYPES = ("F32", "F16", "BF16", "F64")
# Defaults of the family, for keys that a config.json may leave out.
_ROPE_THETA, _NORM_EPS, _MAX_LEN = 10_000.0, 1e-6, 2048


def load_hugging_face(folder: str | Path, dtype: Any = "float32") -> Checkpoint:
    """Read a Hugging Face Llama folder with one or several safetensors files.

    Names, shapes and stored types of all tensors are compared with the config before any weight
    is read.

    Args:
      folder: Folder with config.json.
      dtype: Type of the parameters, "float32" or "bfloat16".

    Raises:
      CheckpointError: A file is missing or damaged, or the model is not a plain Llama.
    """
    folder = Path(folder)
    dtype = resolve_dtype(dtype)
    raw = _read_json(folder / "config.json")
    config = parse_config(raw, folder / "config.json")
    files = _Files(folder)
    shapes = dict(files.shapes)
    if config.tie_embeddings and _NAMES.head in shapes:
        # Some savers write the shared matrix twice.
        del shapes[_NAMES.head]
        files.require_equal(_NAMES.head, _NAMES.embedding)
    check_tensors(config, _NAMES, shapes, folder)
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    eos_ids = _eos_ids(folder, raw, tokenizer)
    return Checkpoint(
        config=config,
        params=assemble_params(config, _NAMES, files.read, dtype, folder),
        tokenizer=tokenizer,
        name=folder.resolve().name,
        source_path=folder,
        eos_ids=eos_ids,
    )


def parse_config(raw: dict[str, Any], source: Path) -> TransformerConfig:
    """Return the sizes in a config.json, refusing by name what would change the computation.

    >>> raw = dict(model_type="llama", vocab_size=97, hidden_size=40, num_hidden_layers=1,
    ...     num_attention_heads=4, intermediate_size=64, head_dim=None,
    ...     rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    >>> config = parse_config(raw, Path("config.json"))
    >>> config.head_dim, config.rope_theta
    (10, 500000.0)
    """
    if raw.get("model_type") != "llama":
        raise CheckpointError(
            f"{source}: model_type {raw.get('model_type')!r} is not known; known: llama"
        )
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise CheckpointError(f"{source}: {key} is true; biases are not supported")
    if raw.get("quantization_config"):
        raise CheckpointError(
            f"{source}: quantization_config is set; save the weights unquantized first"
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(
            f"{source}: hidden_act {raw['hidden_act']!r} is not known; known: silu"
        )

    def size(key: str, default: Any = None) -> Any:
        value = raw.get(key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{source}: the key {key} is missing")
        return value

    D, N = size("hidden_size"), size("num_attention_heads")
    try:
        return TransformerConfig(
            vocab_size=size("vocab_size"),
            num_layers=size("num_hidden_layers"),
            d_model=D,
            num_heads=N,
            num_kv_heads=size("num_key_value_heads", N),
            head_dim=size("head_dim", D // N),
            d_ff=size("intermediate_size"),
            rope_theta=_rope_theta(raw, source),
            norm_eps=size("rms_norm_eps", _NORM_EPS),
            max_len=size("max_position_embeddings", _MAX_LEN),
            tie_embeddings=size("tie_word_embeddings", False),
        )
    except (ConfigError, TypeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{source}: {error}") from None


def _rope_theta(raw: dict[str, Any], source: Path) -> float:
    """Return the rotary base, wherever the writer's version of transformers put it."""
    thetas = [raw["rope_theta"]] if raw.get("rope_theta") is not None else []
    fractions = [raw.get("partial_rotary_factor")]
    for key in ("rope_parameters", "rope_scaling"):
        parameters = raw.get(key)
        if parameters is None:
            continue
        if not isinstance(parameters, dict):
            raise CheckpointError(f"{source}: {key} is {parameters!r}, expected an object or null")
        # Both spellings occur, and old files hold both.
        for spelling in ("rope_type", "type"):
            kind = parameters.get(spelling, "default")
            if kind != "default":
                raise CheckpointError(
                    f"{source}: {key} has {spelling} {kind!r}, which is not known; known: default"
                )
        unknown = parameters.keys() - {
            "rope_type", "type", "rope_theta", "partial_rotary_factor",
        }  # fmt: skip
        if unknown:
            raise CheckpointError(
                f"{source}: {key} has keys that are not known: {', '.join(sorted(unknown))}"
            )
        if parameters.get("rope_theta") is not None:
            thetas.append(parameters["rope_theta"])
        fractions.append(parameters.get("partial_rotary_factor"))
    if any(fraction not in (None, 1, 1.0) for fraction in fractions):
        raise CheckpointError(f"{source}: partial_rotary_factor other than 1 is not supported")
    if len(set(thetas)) > 1:
        raise CheckpointError(f"{source}: two different rope_theta: {thetas[0]} and {thetas[1]}")
    return thetas[0] if thetas else _ROPE_THETA


def _eos_ids(folder: Path, raw: dict[str, Any], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids that end a text: generation_config.json, else config.json, else tokenizer."""
    sources = [raw.get("eos_token_id"), tokenizer.eos_id if tokenizer else None]
    if (folder / "generation_config.json").is_file():
        generation = _read_json(folder / "generation_config.json")
        sources.insert(0, generation.get("eos_token_id"))
    found = next((ids for ids in sources if ids is not None), [])
    ids = tuple(found if isinstance(found, list) else [found])
    if not all(type(id) is int and 0 <= id < raw["vocab_size"] for id in ids):
        raise CheckpointError(
            f"{folder}: eos_token_id is {found!r}, expected ids below {raw['vocab_size']}"
        )
    return ids


class _Files:
    """The safetensors files of a folder, checked as a set before anything is read."""

    def __init__(self, folder: Path):
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        index_path = folder / _INDEX
        listed: Any = {}
        if (folder / _SINGLE).is_file():
            paths = [folder / _SINGLE]
        elif index_path.is_file():
            listed = _read_json(index_path).get("weight_map")
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
            if self._file_of.get(name) != folder / str(shard):
                raise CheckpointError(f"{folder / str(shard)}: tensor {name} is missing")

    def _add(self, path: Path) -> None:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.endswith("rotary_emb.inv_freq"):
                    continue  # a buffer of old savers, computed from the config
                if name in self._file_of:
                    raise CheckpointError(
                        f"{path}: tensor {name} is in {self._file_of[name].name} as well"
                    )
                stored = file.get_slice(name)
                if stored.get_dtype() not in _STORED_TYPES:
                    raise CheckpointError(
                        f"{path}: tensor {name} is stored as {stored.get_dtype()}; "
                        f"known: {', '.join(_STORED_TYPES)}"
                    )
                self._file_of[name] = path
                self.shapes[name] = tuple(stored.get_shape())

    def read(self, name: str) -> np.ndarray:
        with _open(self._file_of[name]) as file:
            return file.get_tensor(name)

    def require_equal(self, name: str, other: str) -> None:
        if other not in self._file_of:
            return  # reported as missing by the complete check
        if not np.array_equal(self.read(name), self.read(other)):
            raise CheckpointError(
                f"{self._file_of[name]}: tie_word_embeddings is true "
                f"but {name} differs from {other}"
            )


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
    """Return the shards that names like model-00001-of-00003 promise and the folder lacks."""
    absent = []
    for path in paths:
        numbered = re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.safetensors)", path.name)
        if numbered is None:
            continue
        stem, digits, of, total, suffix = numbered.groups()
        for i in range(1, int(total) + 1):
            sibling = path.with_name(f"{stem}{i:0{len(digits)}d}{of}{total}{suffix}")
            if sibling not in paths and sibling not in absent:
                absent.append(sibling)
    return absent


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value
