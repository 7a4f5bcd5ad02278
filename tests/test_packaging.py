"""The package works however it is installed, with one copy of each module, and imports run one way."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"espresso.strategies": "strategies", "espresso.compressors": "compressors"}
FOLDERS |= {"espresso.cpu_offload": "cpu_offload", "espresso.comm": "comm", "espresso": "espresso"}

#: Imports everything, then reports where each of our modules came from.
PROBE = """
import importlib, json, pkgutil, sys
import espresso
assert "torch" not in sys.modules, "import espresso pulled in torch"
import espresso.strategies
assert "torch" not in sys.modules, "import espresso.strategies pulled in torch"
for part in ("strategies", "compressors", "cpu_offload", "comm"):
    package = importlib.import_module("espresso." + part)
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
for name in espresso.__all__:
    getattr(espresso, name)
ours = ("espresso", "strategies", "compressors", "cpu_offload", "comm")
print(json.dumps({name: module.__file__ for name, module in sys.modules.items()
                  if name.split(".")[0] in ours and getattr(module, "__file__", None)}))
"""


def _modules() -> Iterator[tuple[str, Path]]:
    """Every source file of the package as (folder, path)."""
    for folder in FOLDERS.values():
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield folder, path


def _run(argv: list[str], cwd: Path, pythonpath: str = "") -> str:
    pythonpath = os.pathsep.join([str(ROOT / "tests" / "interpreters"), *filter(None, [pythonpath])])
    done = subprocess.run(
        argv,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": pythonpath},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, f"{argv} in {cwd} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _probe(python: str, cwd: Path, pythonpath: str = "") -> dict[str, Path]:
    """Where every module of ours was loaded from, run from ``cwd``."""
    out = _run([python, "-c", PROBE], cwd, pythonpath)
    return {name: Path(file).resolve() for name, file in json.loads(out.splitlines()[-1]).items()}


def _check_one_copy(loaded: dict[str, Path], home: Path) -> None:
    assert set(name.split(".")[0] for name in loaded) == {"espresso"}, sorted(loaded)
    assert len(set(loaded.values())) == len(loaded), "a file was loaded under two names"
    strays = {name: file for name, file in loaded.items() if not file.is_relative_to(home)}
    assert not strays, f"not from {home}: {strays}"
    assert {"espresso.strategies", "espresso.compressors", "espresso.cpu_offload", "espresso.comm"} <= set(loaded)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, so that builds leave nothing in the repository."""
    copy = tmp_path_factory.mktemp("source") / "repo"
    copy.mkdir()
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    _run([*pip, "--wheel-dir", str(out), "."], source)
    return next(out.glob("espresso_ddp-*.whl"))


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the regular install in it."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    _run([*pip, "--target", str(target), str(wheel)], target)
    return target


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A new virtual environment that sees our dependencies but not our own install; and its site-packages."""
    env = tmp_path_factory.mktemp("venv")
    _run([sys.executable, "-m", "venv", "--without-pip", str(env)], env)
    packages = next(env.glob("lib/python*/site-packages"))
    # A .pth line adds that folder without running the .pth files in it (our editable install's is one).
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(env / "bin" / "python"), packages


def test_links_lead_to_the_folders() -> None:
    for folder in FOLDERS.values():
        if folder != "espresso":
            link = ROOT / "espresso" / folder
            assert link.is_symlink()
            assert link.resolve() == ROOT / folder


def test_every_package_is_typed_and_proper() -> None:
    for folder in FOLDERS.values():
        assert (ROOT / folder / "py.typed").is_file()
    for folder, path in _modules():
        assert (path.parent / "__init__.py").is_file(), f"{folder}: {path.parent} has no __init__.py"


def test_versions_agree() -> None:
    import espresso

    assert espresso.__version__ == PYPROJECT["project"]["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{espresso.__version__}]" in changelog


def test_every_dependency_is_pinned() -> None:
    pins = (ROOT / "constraints.txt").read_text().lower()
    extras = PYPROJECT["project"]["optional-dependencies"]
    wanted = PYPROJECT["project"]["dependencies"] + [item for name in extras if name != "cuda" for item in extras[name]]
    names = {item.split(">")[0].lower() for item in wanted if not item.startswith("espresso-ddp")}
    assert not {name for name in names if f"\n{name}==" not in pins}
    assert "\ntorch==2.13.0\n" in pins


def test_wheel_holds_code_and_data(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for package, folder in FOLDERS.items():
        files = [path for path in (source / folder).rglob("*") if path.suffix in (".py", ".cu", ".cuh", ".typed")]
        files += list((source / "espresso" / "data").rglob("*.json")) if folder == "espresso" else []
        base = package.replace(".", "/")
        missing = {f"{base}/{path.relative_to(source / folder)}" for path in files} - names
        assert not missing
    assert not {name for name in names if not name.startswith(("espresso/", "espresso_ddp-"))}
    assert any(name.endswith("LICENSE") for name in names)


def test_regular_install_from_elsewhere(site: Path, tmp_path: Path, bare_python: tuple[str, Path]) -> None:
    _check_one_copy(_probe(bare_python[0], tmp_path, str(site)), site)


def test_regular_install_from_repo_root(site: Path, source: Path, bare_python: tuple[str, Path]) -> None:
    """The local folder shadows the installed package: then all of it is local, and nothing is mixed."""
    _check_one_copy(_probe(bare_python[0], source, str(site)), source)


def test_no_install_from_repo_root(source: Path, bare_python: tuple[str, Path]) -> None:
    _check_one_copy(_probe(bare_python[0], source), source)
    assert "search" in _run([bare_python[0], "-m", "espresso", "--help"], source)


def test_editable_install(source: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    env = tmp_path_factory.mktemp("editable")
    _run([sys.executable, "-m", "venv", "--without-pip", str(env)], env)
    packages = next(env.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = str(env / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index"]
    _run([*pip, "--no-build-isolation", "--editable", str(source)], env)
    _check_one_copy(_probe(python, tmp_path), source)
    assert "search" in _run([str(env / "bin" / "espresso"), "--help"], tmp_path)
