"""What a loader returns, and the steps that all formats share.

A format contributes the names of its tensors, their shapes and a function that reads one of them.
The rest is here: the complete comparison of names and shapes before a single weight is read, and
the assembly of the parameter tree, one tensor at a time so that the peak stays near the size of the
result.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.errors import CheckpointError, ConfigError
from kvjax.nn.config import TransformerConfig
from kvjax.nn.layers import outputs_first

DTYPES = ("float32", "bfloat16")

# Names that a message lists before it stops.
_SHOWN = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A pretrained model as read from disk.

    Attributes:
      config: Sizes of the model.
      params: `{"params": {...}}`, jax arrays; matrices as `nn.layers.outputs_first` says.
      tokenizer: None when the folder holds no tokenizer.json.
      name: Registered name, or the name of the folder or file.
      source_path: File or folder that was read.
      eos_ids: Token ids that end a text.
    """

    config: TransformerConfig
    params: dict[str, Any] = dataclasses.field(repr=False)
    tokenizer: Tokenizer | None
    name: str
    source_path: Path
    eos_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorNames:
    """How a format names the tensors of a Llama model; `{i}` is the layer."""

    embedding: str
    attention_norm: str
    q: str
    k: str
    v: str
    out: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    norm: str
    head: str


def resolve_dtype(dtype: Any) -> np.dtype:
    """Return the numpy dtype of the parameters.

    >>> resolve_dtype("bfloat16").name
    'bfloat16'
    """
    try:
        resolved = jnp.dtype(dtype)
    except TypeError:
        resolved = None
    if resolved is None or resolved.name not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not offered for weights; known: {', '.join(DTYPES)}")
    return resolved


def check_tensors(
    config: TransformerConfig,
    names: TensorNames,
    found: Mapping[str, tuple[int, ...]],
    source: Path,
) -> None:
    """Compare names and shapes both ways: nothing may be missing, misshapen or left over.

    Args:
      config: Sizes that the checkpoint states.
      names: Names in this format.
      found: Shape of every tensor that the checkpoint holds.
      source: File or folder, for messages.

    Raises:
      CheckpointError: The message names the source and the first offending tensors.
    """
    missing, known = [], set()
    for name, shape in _expected_shapes(config, names):
        known.add(name)
        if name not in found:
            missing.append(name)
            if len(missing) > _SHOWN:
                break  # a damaged config may ask for billions of layers
        elif found[name] != shape:
            raise CheckpointError(
                f"{source}: tensor {name} has shape {found[name]}, the config asks for {shape}"
            )
    if missing:
        raise CheckpointError(f"{source}: {_first(missing)} missing")
    unknown = [name for name in found if name not in known]
    if unknown:
        raise CheckpointError(
            f"{source}: {_first(unknown)} not part of a Llama model; "
            "loading would give another model than the one that was saved"
        )


def _expected_shapes(
    config: TransformerConfig, names: TensorNames
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of a checkpoint of this config, stored [out, in]."""
    V, D, F, H = config.vocab_size, config.d_model, config.d_ff, config.head_dim
    N, K = config.num_heads, config.num_kv_heads
    layer = {
        names.attention_norm: (D,),
        names.q: (N * H, D),
        names.k: (K * H, D),
        names.v: (K * H, D),
        names.out: (D, N * H),
        names.mlp_norm: (D,),
        names.gate: (F, D),
        names.up: (F, D),
        names.down: (D, F),
    }
    yield names.embedding, (V, D)
    for i in range(config.num_layers):
        for name, shape in layer.items():
            yield name.format(i=i), shape
    yield names.norm, (D,)
    if not config.tie_embeddings:
        yield names.head, (V, D)


def _read_finite(read: Callable[[str], np.ndarray], source: Path, name: str) -> np.ndarray:
    """Read a tensor and refuse NaN and infinities: every text would come out as noise."""
    tensor = read(name)
    if not np.isfinite(tensor).all():
        raise CheckpointError(f"{source}: tensor {name} holds NaN or infinity")
    return tensor


def _first(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown} are"


def one_line(error: Exception) -> str:
    """Return the message of another library's error without line breaks."""
    return " ".join(str(error).split())


def assemble_params(
    config: TransformerConfig,
    names: TensorNames,
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
    source: Path,
) -> dict[str, Any]:
    """Build the parameter tree, reading each tensor once.

    Args:
      config: Sizes; the tensors are known to fit them.
      names: Names in this format.
      read: Returns one tensor as [out, in] (or [D]) with q and k rows in rotate-half order, in
        memory that nobody writes to afterwards; called once a tensor.
      dtype: Type of every parameter.
      source: File or folder that is read, for messages.

    Raises:
      CheckpointError: A tensor holds NaN or infinity.
    """
    D, F, H = config.d_model, config.d_ff, config.head_dim
    N, K = config.num_heads, config.num_kv_heads
    read = functools.partial(_read_finite, read, source)

    def vector(name: str) -> dict[str, jax.Array]:
        return {"scale": jax.device_put(read(name).astype(dtype, copy=False))}

    def kernel(parts: dict[str, int], rows: int) -> dict[str, jax.Array]:
        # Parts lie side by side along the output axis, so that one matmul computes all.
        fused = np.empty((sum(parts.values()), rows), dtype=dtype)
        start = 0
        for name, width in parts.items():
            fused[start : start + width] = read(name)
            start += width
        return {"kernel": matrix(fused)}

    def matrix(weight: np.ndarray) -> jax.Array:
        # Files store [out, in]; the model says how it wants its matrices.
        weight = weight if outputs_first(dtype) else np.ascontiguousarray(weight.T)
        return jax.device_put(weight)

    embedding = matrix(read(names.embedding).astype(dtype, copy=False))
    params: dict[str, Any] = {"embed": {"embedding": embedding}}
    for i in range(config.num_layers):
        at = dataclasses.replace(
            names, **{key: name.format(i=i) for key, name in vars(names).items()}
        )
        params[f"layers_{i}"] = {
            "attention_norm": vector(at.attention_norm),
            "attention": {
                "qkv": kernel({at.q: N * H, at.k: K * H, at.v: K * H}, D),
                "out": kernel({at.out: D}, N * H),
            },
            "mlp_norm": vector(at.mlp_norm),
            "mlp": {
                "gate_up": kernel({at.gate: F, at.up: F}, D),
                "down": kernel({at.down: D}, F),
            },
        }
    params["norm"] = vector(names.norm)
    if not config.tie_embeddings:
        params["head"] = kernel({names.head: config.vocab_size}, D)
    return {"params": params}
