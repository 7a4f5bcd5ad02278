"""Find the sibling folders when ``espresso`` is imported from a source tree.

Installed, ``espresso/strategies/`` and its three sisters lie inside the package. In the repository they lie
beside it, and the ordinary import system would not look there. Putting the repository root on
``espresso.__path__`` would find them, and ``espresso.tests`` and ``espresso.espresso`` too; a finder that
knows four names finds these four only, and each of them once.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

SIBLINGS = ("strategies", "compressors", "cpu_offload", "comm")


class SiblingFinder:
    """A meta-path finder for ``<package>.<sibling>``; everything below them is found the ordinary way."""

    def __init__(self, package: str, root: Path) -> None:
        self._root = root
        self._names = frozenset(f"{package}.{sibling}" for sibling in SIBLINGS)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The sibling's spec, or None for every other module."""
        if fullname not in self._names:
            return None
        return PathFinder.find_spec(fullname, [str(self._root)], target)


def link_siblings(package: str, package_dir: Path) -> None:
    """Make ``package``'s siblings importable if ``package_dir`` is a source tree; else do nothing."""
    root = package_dir.resolve().parent
    is_source_tree = not (package_dir / SIBLINGS[0]).is_dir() and (root / SIBLINGS[0]).is_dir()
    if is_source_tree:
        # First in line: an editable install's finder knows the same folders, and one of them must win always.
        sys.meta_path.insert(0, SiblingFinder(package, root))
