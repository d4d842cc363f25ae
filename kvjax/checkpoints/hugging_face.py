"""Read a model from a Hugging Face folder: config.json, safetensors, tokenizer.json."""

from pathlib import Path
from typing import Any

from kvjax.checkpoints.checkpoint import (
    Checkpoint,
    check_context_len,
    check_token_ids,
    resolve_dtype,
)
from kvjax.checkpoints.families import FAMILIES, Family
from kvjax.checkpoints.raw_config import RawConfig
from kvjax.checkpoints.safetensors_files import SafetensorsFiles, read_json
from kvjax.checkpoints.tensors import Placement, assemble_params, check_tensors
from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.errors import ConfigError
from kvjax.nn.config import TransformerConfig

# Where files say that their weights are quantized.
_QUANTIZED = ("quantization_config", "compression_config")


def load_hugging_face(
    folder: str | Path,
    dtype: Any = "float32",
    *,
    context_len: int | None = None,
    sharding: Placement = None,
) -> Checkpoint:
    """Read a Hugging Face folder with one or several safetensors files.

    Names, shapes and stored types of all tensors are compared with the config before any weight
    is read.

    Args:
      folder: Folder with config.json.
      dtype: Type of the parameters, "float32" or "bfloat16".
      context_len: Positions to make room for; see `kvjax.checkpoints.load_checkpoint`.
      sharding: Where the parameters go; see there.

    Raises:
      CheckpointError: A file is missing or damaged, or the model is of no known family.
      ConfigError: `context_len` is none, or more than the model allows.
    """
    folder = Path(folder)
    dtype = resolve_dtype(dtype)
    raw = RawConfig(read_json(folder / "config.json"), folder / "config.json", context_len)
    family, config = read_config(raw)
    files = SafetensorsFiles(folder, family.ignored and family.ignored(raw))
    if config.tie_embeddings:
        files.drop_tied(family.names.head, family.names.embedding)
    check_tensors(family.parameters(config), files.shapes, folder, family.model_type)
    tokenizer = None
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    eos_ids = _eos_ids(folder, raw, config.vocab_size, tokenizer)
    return Checkpoint(
        config=config,
        params=assemble_params(family.parameters(config), files.read, dtype, folder, sharding),
        tokenizer=tokenizer,
        name=folder.resolve().name,
        source_path=folder,
        eos_ids=eos_ids,
    )


def read_config(raw: RawConfig) -> tuple[Family, TransformerConfig]:
    """Return the family and the sizes that a config.json states.

    Raises:
      CheckpointError: Of no known family, quantized, incomplete or contradictory.
      ConfigError: The context length that was asked for is none, or more than the model allows.

    >>> raw = dict(model_type="llama", vocab_size=97, hidden_size=40, num_hidden_layers=1,
    ...     num_attention_heads=4, intermediate_size=64, head_dim=None,
    ...     rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    >>> _, config = read_config(RawConfig(raw, Path("config.json")))
    >>> config.attention.head_dim, config.layers[0].rotary.theta
    (10, 500000.0)
    """
    check_context_len(raw.context_len)
    model_type = raw.values.get("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise raw.error(f"model_type {model_type!r} is not known; known: {', '.join(FAMILIES)}")
    for key in _QUANTIZED:
        if raw.has(key):
            method = raw.values[key]
            method = method.get("quant_method") if isinstance(method, dict) else method
            raise raw.error(f"{key} is set ({method!r}); save the weights unquantized first")
    try:
        config = family.config(raw)
    except (ConfigError, ArithmeticError) as error:
        raise raw.error(str(error)) from None
    check_context_len(raw.context_len, config.max_len, raw.source)
    return family, config


def _eos_ids(
    folder: Path, raw: RawConfig, vocab_size: int, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Return the ids that end a text: generation_config.json, else config.json, else tokenizer."""
    sources = [raw.values.get("eos_token_id"), tokenizer.eos_id if tokenizer else None]
    if (folder / "generation_config.json").is_file():
        generation = read_json(folder / "generation_config.json")
        sources.insert(0, generation.get("eos_token_id"))
    found = next((ids for ids in sources if ids is not None), [])
    ids = tuple(found if isinstance(found, list) else [found])
    check_token_ids(ids, vocab_size, f"{folder}: eos_token_id")
    return ids
