"""kvjax's own checkpoint: a folder with the config as JSON, the arrays by orbax, the tokenizer.

    kvjax_model.json   format, name, config, dtype, shapes and dtypes of all parameters, eos ids
    params/            orbax
    tokenizer.json     if the model has one

Bits and dtypes come back as they were. The JSON file is written last: a folder without it is no
checkpoint, so an interrupted save is never read.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tokenizers

from kvjax.checkpoints.checkpoint import Checkpoint
from kvjax.checkpoints.configs_as_json import from_json, to_json
from kvjax.checkpoints.tensors import Placement
from kvjax.checkpoints.tokenizer import Tokenizer
from kvjax.errors import CheckpointError, KvjaxError
from kvjax.nn.config import TransformerConfig
from kvjax.nn.transformer import Transformer

FACTS = "kvjax_model.json"
FORMAT = 1


def save_checkpoint(
    folder: str | Path,
    *,
    config: TransformerConfig,
    params: Any,
    name: str,
    eos_ids: tuple[int, ...] = (),
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a model into a new folder.

    Raises:
        CheckpointError: the folder exists.
    """
    folder = Path(folder).absolute()
    if folder.exists():
        raise CheckpointError(f"{folder} exists; a model is saved into a new folder")
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / "params", params)
    facts = {
        "format": FORMAT,
        "name": name,
        "config": to_json(config),
        "eos_ids": list(eos_ids),
        "arrays": {key: _describe(x) for key, x in _by_path(params).items()},
        "tokenizer": None,
    }
    if tokenizer is not None:
        facts["tokenizer"] = tokenizer.facts
        (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def is_saved(folder: str | Path) -> bool:
    """Whether a folder is one that `save_checkpoint` has begun to write."""
    return (Path(folder) / FACTS).is_file() or (Path(folder) / "params" / "_METADATA").exists()


def load_saved(folder: str | Path, dtype: Any = None, *, sharding: Placement = None) -> Checkpoint:
    """Read a model that `save_checkpoint` wrote.

    Args:
        folder: what was given to `save_checkpoint`.
        dtype: the dtype that the parameters must have; None takes what was saved.
        sharding: where the parameters go, as in `load_checkpoint`.

    Raises:
        CheckpointError: it is incomplete or damaged, of another dtype than asked for, or not of the
            shapes that its config needs.
    """
    folder = Path(folder).absolute()
    facts = _read_facts(folder)
    try:
        config, arrays = from_json(facts["config"]), facts["arrays"]
        stored = {entry["dtype"] for entry in arrays.values()}
        described = {key: (tuple(x["shape"]), x["dtype"]) for key, x in arrays.items()}
        name, eos_ids = facts["name"], tuple(facts["eos_ids"])
    except KvjaxError as error:
        raise CheckpointError(f"{folder / FACTS}: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / FACTS} is damaged: {error!r}") from None
    if len(stored) != 1:
        raise CheckpointError(f"{folder / FACTS}: parameters of several dtypes: {sorted(stored)}")
    (saved,) = stored
    if dtype is not None and jnp.dtype(dtype).name != saved:
        raise CheckpointError(
            f"{folder} was saved in {saved}, asked for was {jnp.dtype(dtype).name}; load it as it "
            "is (dtype=None), or convert the original checkpoint again"
        )
    model = Transformer(config, dtype=saved)
    token = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), token, token)
    _check(folder, described, _by_path(shapes))
    target = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_place(sharding, path, x)),
        shapes,
    )
    try:
        with ocp.StandardCheckpointer() as reader:
            params = reader.restore(folder / "params", target)
    except Exception as error:  # orbax raises what its storage backends raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{folder / 'params'} cannot be read: {reason[0]}") from None
    return Checkpoint(
        config=config,
        params=params,
        tokenizer=_read_tokenizer(folder, facts),
        name=name,
        source_path=folder,
        eos_ids=eos_ids,
    )


def _read_facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} holds no complete saved model: {error}") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        found = facts.get("format") if isinstance(facts, dict) else None
        raise CheckpointError(f"{folder / FACTS}: format {found!r}, this version reads {FORMAT}")
    return facts


def _check(folder: Path, described: dict, wanted: dict[str, Any]) -> None:
    """Compare what was saved with what the config needs, both ways, before anything is read."""
    for key in sorted(described.keys() | wanted.keys()):
        if key not in described or key not in wanted:
            what = "missing" if key in wanted else "not part of the model"
            raise CheckpointError(f"{folder}: parameter {key} is {what}")
        shape, dtype = described[key]
        if (shape, dtype) != (wanted[key].shape, wanted[key].dtype.name):
            raise CheckpointError(
                f"{folder}: parameter {key} is {dtype}{list(shape)}, the config asks for "
                f"{wanted[key].dtype.name}{list(wanted[key].shape)}"
            )


def _read_tokenizer(folder: Path, facts: dict[str, Any]) -> Tokenizer | None:
    if facts.get("tokenizer") is None:
        return None
    path = folder / "tokenizer.json"
    try:
        stored = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: not a readable tokenizer: {reason}") from None
    return Tokenizer(stored, **facts["tokenizer"])


def _place(placement: Placement, path, x) -> jax.sharding.Sharding:
    if placement is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if callable(placement):
        return placement(tuple(key.key for key in path[1:]), x.shape)
    return placement


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in leaves}


def _describe(x: jax.Array) -> dict[str, Any]:
    return {"shape": list(x.shape), "dtype": jnp.dtype(x.dtype).name}
