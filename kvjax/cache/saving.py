"""Save a cache to disk and get it back, bit for bit, with orbax."""

import hashlib
import json
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from kvjax.cache.cache import Cache
from kvjax.errors import CheckpointError

SPEC_FILE = "kvjax_cache.json"


def save_cache(cache: Cache, folder: str | Path) -> None:
    """Write a cache into a new folder.

    Raises:
        CheckpointError: the folder exists.
    """
    folder = Path(folder).absolute()
    if folder.exists():
        raise CheckpointError(f"{folder} exists; a cache is saved into a new folder")
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder / "arrays", _by_path(cache))
    facts = {"format": 1, "spec": _fingerprint(cache), "repr": repr(cache)}
    (folder / SPEC_FILE).write_text(json.dumps(facts, indent=1) + "\n")


def restore_cache(folder: str | Path, like: Cache) -> Cache:
    """Read a cache that `save_cache` wrote.

    Args:
        folder: what was given to `save_cache`.
        like: a cache of the same config, sizes, batch and capacity (its content is not used).

    Raises:
        CheckpointError: nothing complete is there, or it was saved from another kind of cache;
            `like` is untouched.
    """
    folder = Path(folder).absolute()
    try:
        facts = json.loads((folder / SPEC_FILE).read_text())
        spec = facts["spec"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} holds no complete saved cache: {error}") from None
    if spec != _fingerprint(like):
        raise CheckpointError(
            f"{folder} was saved from another kind of cache, {facts.get('repr')}; "
            f"this one is {like!r}"
        )
    target = {key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in _by_path(like).items()}
    try:
        with ocp.StandardCheckpointer() as reader:
            arrays = reader.restore(folder / "arrays", target)
    except Exception as error:  # orbax raises what its storage backends raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{folder} cannot be read: {reason[0]}") from None
    # Keys are paths, not positions: the order in which they come back does not matter.
    paths, structure = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(structure, [arrays[jax.tree_util.keystr(p)] for p, _ in paths])


def _by_path(cache: Cache) -> dict[str, jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(cache)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _fingerprint(cache: Cache) -> str:
    shapes = [(key, x.shape, np.dtype(x.dtype).name) for key, x in _by_path(cache).items()]
    return hashlib.sha256(repr((cache.spec, shapes)).encode()).hexdigest()
