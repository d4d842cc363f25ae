"""Read a model from one GGUF file: sizes, dequantized weights and tokenizer.

The metadata are read as the config.json that they were made from, and tensors are found under
their names in Hugging Face folders, so a family that is known there needs a line here. GGUF stores
linear weights as [out, in] and, for the Llama architecture, the rows of the query and key
projections reordered for interleaved rotary pairs; they are put back into half-split order.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvjax.checkpoints.checkpoint import Checkpoint, one_line, resolve_dtype
from kvjax.checkpoints.families import Family
from kvjax.checkpoints.hugging_face import read_config
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.tensors import (
    Parameter,
    Placement,
    Shape,
    View,
    assemble_params,
    check_tensors,
    half_split,
)
from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.errors import CheckpointError, ConfigError, KvjaxError
from kvjax.nn.config import AttentionConfig, TransformerConfig
from kvjax.nn.rotary import PairFactors

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_EMBEDDING, _HEAD, _FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"


class _Reader(gguf.GGUFReader):
    """The package's reader: faster, not past the end, and naming the tensor that a cut removed."""

    @property
    def data(self) -> np.ndarray:
        return self._bytes

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        # As a plain array: slicing a np.memmap takes most of the time for 100,000 short strings.
        self._bytes = mapped.view(np.ndarray)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if orig_offs >= len(self.data):
            raise IndexError  # a damaged count would go on for ever: slices past the end are empty
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
            end = start_offs + int(offset[0]) + math.prod(dims.tolist()) * block_bytes // block
            if end > len(self.data):
                raise EOFError(
                    f"tensor {bytes(name).decode()} ends at byte {end}, "
                    f"the file at byte {len(self.data)}; copy it again"
                )
        super()._build_tensors(start_offs, fields)


class _Metadata:
    """Typed access to the key-value part of the file."""

    def __init__(self, reader: gguf.GGUFReader, path: Path):
        self._fields, self._path = reader.fields, path

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        if key not in self._fields:
            raise CheckpointError(f"{self._path}: the key {key} is missing")
        return self.get(key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Header:
    """Everything but the weights, checked."""

    config: TransformerConfig
    parameters: list[Parameter]
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    tensors: dict[str, gguf.ReaderTensor]


def load_gguf(
    path: str | Path,
    dtype: Any = "float32",
    *,
    name: str | None = None,
    context_len: int | None = None,
    sharding: Placement = None,
) -> Checkpoint:
    """Read a GGUF file.

    Args:
      path: The file.
      dtype: Type of the parameters, "float32" or "bfloat16".
      name: Name of the model; by default that of the file.
      context_len: Positions to make room for; see `kvjax.checkpoints.load_checkpoint`.
      sharding: Where the parameters go; see there.

    Raises:
      CheckpointError: The file is missing, damaged, or of an architecture that is not known.
      ConfigError: `context_len` is none, or more than the model allows.
    """
    path = Path(path)
    dtype = resolve_dtype(dtype)
    with _damage_named(path):
        header = _read_header(path, context_len)

    def read(key: str) -> np.ndarray:
        # Taken out: what has been read need not stay.
        tensor = header.tensors.pop(key)
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            return np.array(tensor.data)  # not a view of the file, which may change later
        try:
            return gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise CheckpointError(
                f"{path}: tensor {key} is stored as {tensor.tensor_type.name}, "
                "which the gguf package cannot decode"
            ) from None

    return Checkpoint(
        config=header.config,
        params=assemble_params(header.parameters, read, dtype, path, sharding),
        tokenizer=header.tokenizer,
        name=name or path.stem,
        source_path=path,
        eos_ids=header.eos_ids,
    )


def _read_header(path: Path, context_len: int | None) -> _Header:
    reader = _Reader(path)
    if reader.byte_order != "I":
        raise CheckpointError(f"{path}: written for the other byte order; convert it first")
    metadata = _Metadata(reader, path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    # GGUF lists the fastest axis first.
    shapes = {key: tuple(reversed(tensor.shape.tolist())) for key, tensor in tensors.items()}
    architecture = metadata.require("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not known; "
            f"known: {', '.join(_ARCHITECTURES)}"
        )
    family, config = read_config(_raw_config(metadata, architecture, shapes, path, context_len))
    if (factors := tensors.pop(_FACTORS, None)) is not None:
        config = _with_factors(config, factors, path)
        del shapes[_FACTORS]
    parameters = list(_parameters(family, config, architecture))
    check_tensors(parameters, shapes, path, family.model_type)
    tokenizer = _read_tokenizer(metadata, config, path)
    eos = [tokenizer.eos_id, metadata.get("tokenizer.ggml.eot_token_id")]
    return _Header(
        config=config,
        parameters=parameters,
        tokenizer=tokenizer,
        eos_ids=tuple(dict.fromkeys(id for id in eos if id is not None)),
        tensors=tensors,
    )


def _raw_config(
    metadata: _Metadata,
    architecture: str,
    shapes: dict[str, Shape],
    path: Path,
    context_len: int | None,
) -> RawConfig:
    """Return the metadata under the keys of a config.json."""
    if _EMBEDDING not in shapes:
        raise CheckpointError(f"{path}: tensor {_EMBEDDING} is missing")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    def require(key: str) -> Any:
        return metadata.require(f"{architecture}.{key}")

    if get("expert_count", 0):
        raise CheckpointError(
            f"{path}: mixture of experts ({architecture}.expert_count) is not supported"
        )
    D, N = require("embedding_length"), require("attention.head_count")
    # Older files leave the length out; the rule of that time was D // N.
    H = get("attention.key_length", D // N)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, H) != H:
            raise CheckpointError(
                f"{path}: {architecture}.{key} is {get(key)}, only {H} is supported"
            )
    values = {
        "model_type": architecture,
        "vocab_size": shapes[_EMBEDDING][0],
        "num_hidden_layers": require("block_count"),
        "hidden_size": D,
        "num_attention_heads": N,
        "num_key_value_heads": get("attention.head_count_kv", N),
        "head_dim": H,
        "intermediate_size": require("feed_forward_length"),
        "rope_theta": get("rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(get, path),
        "rms_norm_eps": _shortest(require("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": require("context_length"),
        "tie_word_embeddings": _HEAD not in shapes,
        "sliding_window": None,
    }
    return RawConfig(values, path, context_len)


def _rope_scaling(get: Any, path: Path) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{path}: rotary scaling {kind!r} is not known; known: none, linear, yarn"
        )
    scaling = {"rope_type": kind, "factor": get("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
    return scaling


def _with_factors(
    config: TransformerConfig, tensor: gguf.ReaderTensor, path: Path
) -> TransformerConfig:
    """Divide the frequencies by the factors that converters write for Llama 3's scaling."""
    factors = PairFactors(factors=tuple(np.array(tensor.data, np.float64).reshape(-1).tolist()))
    layers = []
    for layer in config.layers:
        assert layer.rotary is not None
        if layer.rotary.scaling is not None:
            raise CheckpointError(f"{path}: both {_FACTORS} and another rotary scaling")
        rotary = dataclasses.replace(layer.rotary, scaling=factors)
        layers.append(dataclasses.replace(layer, rotary=rotary))
    return dataclasses.replace(config, layers=tuple(layers))


def _parameters(
    family: Family, config: TransformerConfig, architecture: str
) -> Iterator[Parameter]:
    """Yield the family's parameters under the names that GGUF has for their tensors."""
    attention = config.attention
    assert isinstance(attention, AttentionConfig)
    names = gguf.get_tensor_name_map(_ARCHITECTURES[architecture], config.num_layers)
    views: dict[str, View] = {}
    if architecture == "llama":
        for projection, heads in (("q", attention.num_heads), ("k", attention.num_kv_heads)):
            views[f"{projection}_proj"] = half_split(heads, 0, attention.head_dim)
    for parameter in family.parameters(config):
        parts = tuple(
            dataclasses.replace(
                part,
                name=names.get_name(part.name, try_suffixes=(".weight", ".bias")),
                view=views.get(part.name.split(".")[-2], part.view),
            )
            for part in parameter.parts
        )
        yield dataclasses.replace(parameter, parts=parts)


def _read_tokenizer(metadata: _Metadata, config: TransformerConfig, path: Path) -> Tokenizer:
    kind = metadata.require("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{path}: tokenizer {kind!r} is not known; known: gpt2 (byte-level BPE)"
        )
    tokens = metadata.require("tokenizer.ggml.tokens")
    if len(tokens) != config.vocab_size:
        raise CheckpointError(
            f"{path}: {len(tokens)} tokens but {config.vocab_size} rows in {_EMBEDDING}"
        )
    return Tokenizer.from_gguf_fields(
        tokens=tokens,
        merges=metadata.require("tokenizer.ggml.merges"),
        token_types=metadata.require("tokenizer.ggml.token_type"),
        pre=metadata.get("tokenizer.ggml.pre", "default"),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_id=metadata.get("tokenizer.ggml.eos_token_id"),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", False),
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def _shortest(value: float) -> float:
    """Return the decimal number that was meant by a float32: 1e-05, not 9.9999997e-06."""
    return float(str(np.float32(value)))


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes the reader raise into one line that names the file."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(str(path)):
            raise
        raise CheckpointError(f"{path}: {error}") from None
    except ConfigError as error:
        if str(error).startswith("context_len"):
            raise  # the caller's, not the file's
        raise CheckpointError(f"{path}: {error}") from None
    except KvjaxError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except IndexError:
        # The package reads past the end without a check and then indexes an empty array.
        raise CheckpointError(f"{path}: the file ends inside its header; copy it again") from None
    except Exception as error:
        # The package checks little: a wrong byte surfaces as KeyError, ValueError,
        # UnicodeDecodeError, OverflowError, ...
        raise CheckpointError(f"{path}: damaged or not a GGUF file ({one_line(error)})") from None
