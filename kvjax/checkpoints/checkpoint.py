"""What a loader returns, and what all formats ask first."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.errors import CheckpointError, ConfigError
from kvjax.nn.config import TransformerConfig

DTYPES = ("float32", "bfloat16")


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

    @property
    def dtype(self) -> str:
        """Name of the dtype of the parameters."""
        return jnp.dtype(self.params["params"]["embed"]["embedding"].dtype).name


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


def check_context_len(
    asked: int | None, max_len: int | None = None, source: Path | None = None
) -> None:
    """Refuse a context length that is none, or that exceeds the positions of a model.

    Args:
      asked: What the caller gave.
      max_len: Positions that the model has with it; None checks `asked` alone.
      source: File that states them.
    """
    if asked is None:
        return
    if type(asked) is not int or asked < 1:
        raise ConfigError(f"context_len={asked!r}, expected a whole number of at least 1")
    if max_len is not None and asked > max_len:
        raise ConfigError(
            f"context_len={asked} exceeds the {max_len} positions that {source} states "
            "(max_position_embeddings) or that its rotary scaling reaches"
        )


def check_token_ids(ids: tuple[Any, ...], vocab_size: int, what: str) -> None:
    """Refuse ids that are no tokens; `what` names them."""
    if not all(type(id) is int and 0 <= id < vocab_size for id in ids):
        raise CheckpointError(f"{what} is {list(ids)!r}, expected ids below {vocab_size}")


def one_line(error: Exception) -> str:
    """Return the message of another library's error without line breaks."""
    return " ".join(str(error).split())
