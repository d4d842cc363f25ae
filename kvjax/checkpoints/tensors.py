"""From the tensors of a file to the parameter tree: what a family describes, and what is done.

A family says for each parameter which stored tensors it is made of and where each of them goes.
The rest is here: the complete comparison of names and shapes before a single weight is read, and
the assembly, one parameter at a time so that the peak stays near the size of the result.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from kvjax.errors import CheckpointError
from kvjax.nn.layers import outputs_first

Shape = tuple[int, ...]
View = Callable[[np.ndarray], np.ndarray]
Placement = Sharding | Callable[[tuple[str, ...], Shape], Sharding] | None
"""Where parameters go: the default device, one sharding for all, or one for each path and shape."""

# Names that a message lists before it stops.
_SHOWN = 3
# Values that are checked at once: the check needs a byte for each.
_CHECKED = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A stored tensor, or what a view takes of it, and its place in a parameter.

    Attributes:
      name: In the file.
      shape: In the file.
      place: Index into the parameter.
      view: Turns or cuts the stored tensor into what goes there; None takes it as it is.
    """

    name: str
    shape: Shape
    place: Any = ...
    view: View | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameter:
    """One array of the parameter tree.

    Attributes:
      path: Keys below "params".
      shape: As assembled; matrices as [out, in].
      parts: What it is made of; parts of one tensor stand next to each other.
      matrix: Stored as `kvjax.nn.layers.outputs_first` says; others as they are.
    """

    path: tuple[str, ...]
    shape: Shape
    parts: tuple[Part, ...]
    matrix: bool = False

    @classmethod
    def whole(cls, *path: str, name: str, shape: Shape) -> "Parameter":
        """A parameter that a tensor of the file holds as it is."""
        return cls(path=path, shape=shape, parts=(Part(name=name, shape=shape),))

    @classmethod
    def rows(
        cls, *path: str, names: Mapping[str, int], width: Shape, view: View | None = None
    ) -> "Parameter":
        """Matrices [out, in] or vectors [out], one below the other, so that one product does all.

        Args:
          *path: Keys below "params".
          names: Tensors of the file, each with its number of rows.
          width: (in,) for matrices and () for vectors.
          view: Reorders the rows of each.
        """
        ends = list(itertools.accumulate(names.values()))
        parts = tuple(
            Part(name=name, shape=(count, *width), place=slice(end - count, end), view=view)
            for (name, count), end in zip(names.items(), ends, strict=True)
        )
        return cls(path=path, shape=(ends[-1], *width), parts=parts, matrix=bool(width))


def check_tensors(
    parameters: Iterable[Parameter], found: Mapping[str, Shape], source: Path, model_type: str
) -> None:
    """Compare names and shapes both ways: nothing may be missing, misshapen or left over.

    Args:
      parameters: What the config asks for.
      found: Shape of every tensor that the checkpoint holds.
      source: File or folder, for messages.
      model_type: Family, for messages.

    Raises:
      CheckpointError: The message names the source and the first offending tensors.
    """
    missing: list[str] = []
    known: set[str] = set()
    for part in itertools.chain.from_iterable(parameter.parts for parameter in parameters):
        if part.name in known:
            continue
        known.add(part.name)
        if part.name not in found:
            missing.append(part.name)
            if len(missing) > _SHOWN:
                break  # a damaged config may ask for millions
        elif found[part.name] != part.shape:
            raise CheckpointError(
                f"{source}: tensor {part.name} has shape {found[part.name]}, "
                f"the config asks for {part.shape}"
            )
    if missing:
        raise CheckpointError(f"{source}: {_first(missing)} missing")
    unknown = [name for name in found if name not in known]
    if unknown:
        raise CheckpointError(
            f"{source}: {_first(unknown)} not part of a {model_type} model of this config; "
            "loading would give another model than the one that was saved"
        )


def assemble_params(
    parameters: Iterable[Parameter],
    read: Callable[[str], np.ndarray],
    dtype: np.dtype,
    source: Path,
    placement: Placement = None,
) -> dict[str, Any]:
    """Build the parameter tree.

    Args:
      parameters: What the tree holds; names and shapes are known to fit the file.
      read: Returns a stored tensor; called once for each parameter that it is part of.
      dtype: Type of every parameter.
      source: File or folder that is read, for messages.
      placement: Devices of the parameters.

    Raises:
      CheckpointError: A tensor holds NaN or infinity.
    """
    tree: dict[str, Any] = {}
    # The largest first: what reading needs on top then comes while little has been kept.
    for parameter in sorted(parameters, key=lambda p: -int(np.prod(p.shape, dtype=np.int64))):
        array = _assemble(parameter, read, dtype, source)
        where = placement(parameter.path, array.shape) if callable(placement) else placement
        node = tree
        for key in parameter.path[:-1]:
            node = node.setdefault(key, {})
        node[parameter.path[-1]] = jax.device_put(array, where)
    return {"params": tree}


def _assemble(
    parameter: Parameter, read: Callable[[str], np.ndarray], dtype: np.dtype, source: Path
) -> np.ndarray:
    turned = parameter.matrix and not outputs_first(dtype)
    out = np.empty(parameter.shape[::-1] if turned else parameter.shape, dtype)
    logical = out.T if turned else out
    for name, parts in itertools.groupby(parameter.parts, key=lambda part: part.name):
        stored = read(name)
        if not all(np.isfinite(block).all() for block in _blocks(stored)):
            # Every text would come out as noise.
            raise CheckpointError(f"{source}: tensor {name} holds NaN or infinity")
        with np.errstate(over="ignore"):
            for part in parts:
                logical[part.place] = stored if part.view is None else part.view(stored)
    if not all(np.isfinite(block).all() for block in _blocks(out)):
        names = ", ".join(dict.fromkeys(part.name for part in parameter.parts[:_SHOWN]))
        raise CheckpointError(f"{source}: tensor {names} holds numbers too large for {dtype.name}")
    return out


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHECKED):
        yield flat[start : start + _CHECKED]


def _first(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown} are"


def half_split(heads: int, kept: int, turned: int) -> View:
    """View that reorders rows from interleaved rotary pairs to half-split ones.

    Of each head's rows the first `kept` stay. Of the others, row 2j + s, the s-th member of pair j,
    becomes row s * turned / 2 + j.

    Args:
      heads: Number of heads.
      kept: Rows of a head that are not turned.
      turned: R, rows of a head that are.

    >>> half_split(heads=1, kept=1, turned=4)(np.arange(5)).tolist()
    [0, 1, 3, 2, 4]
    """

    def view(stored: np.ndarray) -> np.ndarray:
        # Not before there is a tensor: a damaged config may ask for billions of rows.
        pairs = kept + np.arange(turned).reshape(-1, 2).T.reshape(-1)
        head = np.concatenate([np.arange(kept), pairs])
        return stored[(np.arange(heads)[:, None] * (kept + turned) + head).reshape(-1)]

    return view
