"""The rooms of the house: each says what it may import, every import obeys, and nothing runs in circles."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "espresso"
FOLDERS = ("strategies", "compressors", "cpu_offload", "comm")


def _files() -> Iterator[tuple[str, Path]]:
    """(room, file) of the product."""
    for path in sorted([*PACKAGE.rglob("*.py"), *(p for f in FOLDERS for p in (ROOT / f).rglob("*.py"))]):
        inside = path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else ROOT)
        yield ".".join(inside.parts[:-1]), path


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a file imports; of ``from a import b`` it is ``a.b``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write the whole name"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def _module_of(name: str) -> Path | None:
    """The file that a dotted name of ours is, or lies in."""
    parts = name.split(".")
    while parts:
        base = ROOT.joinpath(*parts[1:]) if len(parts) > 1 and parts[1] in FOLDERS else ROOT.joinpath(*parts)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return path
        parts.pop()
    return None


def _may_import() -> dict[str, tuple[str, ...]]:
    """Every room and the rooms that its first lines name; it may also import what these may."""
    named = {}
    for room in sorted({room for room, _ in _files()} - {""}):
        init = next(path for r, path in _files() if r == room and path.name == "__init__.py")
        doc = " ".join((ast.get_docstring(ast.parse(init.read_text())) or "").split())
        said = re.search(r"May import: ([a-z_., ]+?)\.(?: |$)", doc)
        assert said, f"{room}: its first lines do not say 'May import: ….'"
        assert said.start() > 20, f"{room}: its first lines do not say what it owns"
        named[room] = () if said[1] == "nothing of ours" else tuple(said[1].split(", "))
        assert set(named[room]) <= {r for r, _ in _files()}, f"{room} names {said[1]}"
    return named | {"": tuple(named)}  # the door: ``espresso/*.py`` itself


def _floors() -> dict[str, set[str]]:
    """Every room and all rooms that it may import, from the ground up."""
    named, below = _may_import(), {}
    while len(below) < len(named):
        free = [room for room in named if room not in below and set(named[room]) <= set(below)]
        assert free, f"rooms in a circle: {sorted(set(named) - set(below))}"
        below |= {room: set(named[room]).union(*(below[other] for other in named[room])) for room in free}
    return below


def test_imports_between_rooms_run_one_way() -> None:
    room_of = {path: room for room, path in _files()}
    below = _floors()
    wrong = []
    for room, path in _files():
        for line, name in _imports(path):
            target = _module_of(name) if name.split(".")[0] == "espresso" else None
            if target is None or target == PACKAGE / "__init__.py":
                continue
            if room_of[target] != room and room_of[target] not in below[room]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_files() -> None:
    """Imports inside functions and for type checkers count: who needs whom is the question."""
    needs: dict[Path, set[Path]] = {}
    for _, path in _files():
        found = {_module_of(name) for _, name in _imports(path) if name.split(".")[0] == "espresso"}
        # The front door loads public names on first use, and a package's own `__init__` is loaded with its files.
        needs[path] = {p for p in found if p is not None and p not in (path, PACKAGE / "__init__.py")}
    done: set[Path] = set()

    def visit(path: Path, way: tuple[Path, ...]) -> None:
        assert path not in way, " -> ".join(str(p.relative_to(ROOT)) for p in (*way, path))
        if path in done:
            return
        for other in sorted(needs[path]):
            visit(other, (*way, path))
        done.add(path)

    for path in needs:
        visit(path, ())


def test_foreign_imports_are_declared() -> None:
    """Ours are imported by their whole name: a bare ``comm`` would be a second copy of every module."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(item for name in ("cuda", "mpi", "plot", "frameworks") for item in extras[name]),
    ]
    declared = {re.split(r"[>=<\[]", item)[0] for item in wanted} | {"espresso", "cupy", "llvmlite"}
    wrong = []
    for room, path in _files():
        allowed = {"espresso"} if room == "strategies" else declared
        for line, name in _imports(path):
            top = name.split(".")[0]
            if top not in allowed and top not in sys.stdlib_module_names:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_kernels_of_the_search_are_in_its_digest() -> None:
    """A kernel whose source is not in the digest would be taken from the cache after it has changed."""
    from espresso.model import jit

    users = [p for _, p in _files() if any(name.startswith("espresso.model.jit") for _, name in _imports(p))]
    assert users
    for path in users:
        assert path.name.endswith("_kernels.py"), f"{path.name} compiles kernels, its name should say so"
        assert path.parent in {jit.ROOT / room for room in jit.ROOMS}
