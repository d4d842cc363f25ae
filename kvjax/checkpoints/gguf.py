"""Read a Llama model from one GGUF file: sizes, dequantized weights and tokenizer.

GGUF stores linear weights as [out, in] and, for the Llama architecture, the rows of the query and
key projections reordered for interleaved rotary pairs. They are put back into rotate-half order.
"""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvjax.checkpoints.checkpoint import (
    Checkpoint,
    TensorNames,
    assemble_params,
    check_tensors,
    one_line,
    resolve_dtype,
)
from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.errors import CheckpointError, KvjaxError
from kvjax.nn.config import TransformerConfig

_NAMES = TensorNames(
    embedding="token_embd.weight",
    attention_norm="blk.{i}.attn_norm.weight",
    q="blk.{i}.attn_q.weight",
    k="blk.{i}.attn_k.weight",
    v="blk.{i}.attn_v.weight",
    out="blk.{i}.attn_output.weight",
    mlp_norm="blk.{i}.ffn_norm.weight",
    gate="blk.{i}.ffn_gate.weight",
    up="blk.{i}.ffn_up.weight",
    down="blk.{i}.ffn_down.weight",
    norm="output_norm.weight",
    head="output.weight",
)


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


def load_gguf(path: str | Path, dtype: Any = "float32", *, name: str | None = None) -> Checkpoint:
    """Read a Llama GGUF file.

    Args:
      path: The file.
      dtype: Type of the parameters, "float32" or "bfloat16".
      name: Name of the model; by default that of the file.

    Raises:
      CheckpointError: The file is missing, damaged, or not a plain Llama model.
    """
    path = Path(path)
    dtype = resolve_dtype(dtype)
    with _damage_named(path):
        config, tokenizer, eos_ids, tensors = _read_header(path)

    N, K = config.num_heads, config.num_kv_heads
    heads = {_NAMES.q.format(i=i): N for i in range(config.num_layers)}
    heads |= {_NAMES.k.format(i=i): K for i in range(config.num_layers)}

    def read(key: str) -> np.ndarray:
        # Taken out: what has been read need not stay.
        tensor = tensors.pop(key)
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            weight = np.array(tensor.data)  # not a view of the file, which may change later
        else:
            try:
                weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError:
                raise CheckpointError(
                    f"{path}: tensor {key} is stored as {tensor.tensor_type.name}, "
                    "which the gguf package cannot decode"
                ) from None
        return rotate_half_rows(weight, heads[key]) if key in heads else weight

    return Checkpoint(
        config=config,
        params=assemble_params(config, _NAMES, read, dtype, path),
        tokenizer=tokenizer,
        name=name or path.stem,
        source_path=path,
        eos_ids=eos_ids,
    )


def rotate_half_rows(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the rows of a q or k projection from interleaved to rotate-half pairs.

    Row 2j + s of a head, the s-th member of pair j, becomes row s * H/2 + j.

    Args:
      weight: [heads * H, D].
      heads: Number of heads.

    >>> rotate_half_rows(np.arange(4.0)[:, None], heads=1)[:, 0].tolist()
    [0.0, 2.0, 1.0, 3.0]
    """
    rows, D = weight.shape
    H = rows // heads
    return weight.reshape(heads, H // 2, 2, D).swapaxes(1, 2).reshape(rows, D)


def _read_header(
    path: Path,
) -> tuple[TransformerConfig, Tokenizer, tuple[int, ...], dict[str, gguf.ReaderTensor]]:
    """Read and check everything but the weights."""
    reader = _Reader(path)
    if reader.byte_order != "I":
        raise CheckpointError(f"{path}: written for the other byte order; convert it first")
    metadata = _Metadata(reader, path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    # GGUF lists the fastest axis first.
    shapes = {key: tuple(reversed(tensor.shape.tolist())) for key, tensor in tensors.items()}
    config = _read_config(metadata, shapes, path)
    check_tensors(config, _NAMES, shapes, path)
    tokenizer = _read_tokenizer(metadata, config, path)
    eos = [tokenizer.eos_id, metadata.get("tokenizer.ggml.eot_token_id")]
    eos_ids = tuple(dict.fromkeys(id for id in eos if id is not None))
    return config, tokenizer, eos_ids, tensors


def _read_config(
    metadata: _Metadata, shapes: dict[str, tuple[int, ...]], path: Path
) -> TransformerConfig:
    architecture = metadata.require("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{path}: architecture {architecture!r} is not known; known: llama")
    if _NAMES.embedding not in shapes:
        raise CheckpointError(f"{path}: tensor {_NAMES.embedding} is missing")
    _refuse_extensions(metadata, shapes, path)
    D = metadata.require("llama.embedding_length")
    N = metadata.require("llama.attention.head_count")
    # Older files leave the length out; the rule of that time was D // N.
    H = metadata.get("llama.attention.key_length", D // N)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.get(key, H) != H:
            raise CheckpointError(f"{path}: {key} is {metadata.get(key)}, only {H} is supported")
    return TransformerConfig(
        vocab_size=shapes[_NAMES.embedding][0],
        num_layers=metadata.require("llama.block_count"),
        d_model=D,
        num_heads=N,
        num_kv_heads=metadata.get("llama.attention.head_count_kv", N),
        head_dim=H,
        d_ff=metadata.require("llama.feed_forward_length"),
        rope_theta=metadata.get("llama.rope.freq_base", 10_000.0),
        norm_eps=_shortest(metadata.require("llama.attention.layer_norm_rms_epsilon")),
        max_len=metadata.require("llama.context_length"),
        tie_embeddings=_NAMES.head not in shapes,
    )


def _refuse_extensions(metadata: _Metadata, shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Refuse what changes the computation and is not built, by name."""
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in shapes:
        kind = scaling if scaling != "none" else "rope_freqs.weight"
        raise CheckpointError(f"{path}: rotary scaling ({kind}) is not supported")
    if metadata.get("llama.expert_count", 0):
        raise CheckpointError(f"{path}: mixture of experts (llama.expert_count) is not supported")


def _read_tokenizer(metadata: _Metadata, config: TransformerConfig, path: Path) -> Tokenizer:
    kind = metadata.require("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{path}: tokenizer {kind!r} is not known; known: gpt2 (byte-level BPE)"
        )
    tokens = metadata.require("tokenizer.ggml.tokens")
    if len(tokens) != config.vocab_size:
        raise CheckpointError(
            f"{path}: {len(tokens)} tokens but {config.vocab_size} rows in {_NAMES.embedding}"
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
