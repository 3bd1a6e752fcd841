"""Paths of agent loops' files."""

from pathlib import Path

import verl


def resolve_config_path(config_path: str) -> str:
    """The file for an absolute path, or for one below the working folder, the project's root or the package.

    Raises FileNotFoundError with the folders that were searched; ValueError for a relative path that leaves its root.
    """
    path = Path(config_path).expanduser()
    if path.is_absolute():
        roots, files = [path.parent], [path]
    else:
        package = Path(verl.__file__).parent
        roots = [Path.cwd(), package.parent, package]
        files = [root / path for root in roots]
        for root, file in zip(roots, files, strict=True):
            if not file.resolve().is_relative_to(root.resolve()):
                raise ValueError(f"{config_path!r} leaves {root}; give an absolute path")
    for file in files:
        if file.is_file():
            return str(file)
    raise FileNotFoundError(f"{config_path!r} is no file in {', '.join(str(root) for root in roots)}")
