"""kvjax's own checkpoint: a folder with the config as JSON, the arrays by orbax, the tokenizer.

    kvjax_model.json   format, name, config, shapes and dtypes of all parameters, sizes of files
    params/            orbax
    tokenizer.json     if the model has one

Bits and dtypes come back as they were. The JSON file is written last: a folder without it is no
checkpoint, so an interrupted save is never read.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tokenizers

from kvjax.checkpoints.checkpoint import Checkpoint, check_token_ids, one_line, resolve_dtype
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
        CheckpointError: the folder exists or cannot be made; nothing is left behind.
    """
    folder = Path(folder).absolute()
    facts = {
        "format": FORMAT,
        "name": name,
        "config": to_json(config),
        "eos_ids": [int(id) for id in eos_ids],
        "arrays": {key: _describe(x) for key, x in _by_path(params).items()},
        "tokenizer": None,
    }
    vocabulary = None
    if tokenizer is not None:
        facts["tokenizer"], vocabulary = tokenizer.facts, tokenizer.to_json()
    json.dumps(facts)  # what cannot be written is said before the work
    make_new_folder(folder)
    try:
        with ocp.StandardCheckpointer() as writer:
            writer.save(folder / "params", params)
        if vocabulary is not None:
            (folder / "tokenizer.json").write_text(vocabulary, encoding="utf-8")
        facts["files"] = _sizes(folder)
        (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise CheckpointError(f"{folder} cannot be written: {reason}") from None
        raise


def make_new_folder(folder: Path) -> None:
    """Make a folder that was not there, with its parents.

    Raises:
        CheckpointError: it is there, or cannot be made.
    """
    if os.path.lexists(folder):
        raise CheckpointError(f"{folder} exists; a model is saved into a new folder")
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {error.strerror or error}") from None


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
    wanted = None if dtype is None else resolve_dtype(dtype).name
    try:
        config, arrays = from_json(facts["config"]), facts["arrays"]
        if not isinstance(config, TransformerConfig):
            raise CheckpointError(f"the config is a {type(config).__name__}")
        stored = {entry["dtype"] for entry in arrays.values()}
        described = {key: (tuple(x["shape"]), x["dtype"]) for key, x in arrays.items()}
        name, eos_ids = str(facts["name"]), tuple(facts["eos_ids"])
        files = dict(facts["files"])
        if len(stored) != 1:
            raise CheckpointError(f"parameters of several dtypes: {sorted(stored)}")
        (saved,) = stored
        check_token_ids(eos_ids, config.vocab_size, "eos_ids")
        model = Transformer(config, dtype=resolve_dtype(saved).name)
        token = jnp.zeros((1, 1), jnp.int32)
        shapes = jax.eval_shape(model.init, jax.random.key(0), token, token)
    except KvjaxError as error:
        raise CheckpointError(f"{folder / FACTS}: {error}") from None
    except Exception as error:  # whatever wrong types make of a config
        raise CheckpointError(f"{folder / FACTS} is damaged: {one_line(error)}") from None
    if wanted not in (None, saved):
        raise CheckpointError(
            f"{folder} was saved in {saved}, asked for was {wanted}; give dtype={saved!r} "
            "or none, or convert the original checkpoint again"
        )
    _check(folder, described, _by_path(shapes))
    _check_files(folder, files)
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
    except (OSError, ValueError, RecursionError) as error:
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


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file that holds parameters."""
    files = sorted(path for path in (folder / "params").rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _check_files(folder: Path, saved: dict[str, int]) -> None:
    """Refuse files that are missing or cut, before orbax reads the others."""
    found = _sizes(folder)
    for name, size in saved.items():
        if found.get(name) != size:
            now = f"has {found[name]} bytes" if name in found else "is missing"
            raise CheckpointError(f"{folder / name} {now}, {size} were saved; copy it again")


def _read_tokenizer(folder: Path, facts: dict[str, Any]) -> Tokenizer | None:
    if facts.get("tokenizer") is None:
        return None
    path = folder / "tokenizer.json"
    try:
        stored = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: not a readable tokenizer: {reason}") from None
    try:
        return Tokenizer(stored, **facts["tokenizer"])
    except TypeError as error:
        raise CheckpointError(f"{folder / FACTS} is damaged: tokenizer: {error}") from None


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
