"""Nothing needs a home, a known user, root, a terminal or writable packages: kernels compile into what there is."""

import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ports import free_port
from espresso.jit.folders import private_folder
from espresso.jit.turns import Turn
from espresso.model.presets import job_from_trace
from espresso.strategies import Strategy

ROOT = Path(__file__).resolve().parents[1]
USER = "12345"
"""Of nobody."""

TRAIN = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import espresso
from espresso.strategies import Choice, Cluster, CompressorSpec, Strategy, TensorSpec, parse_option

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False))
choice = Choice(parse_option("comp > flat.allgather > dec"), CompressorSpec.parse("fp16"))
strategy = Strategy.uniform([TensorSpec("weight", (64, 64))], Cluster(1, 2), choice)
state = espresso.register(model, strategy=strategy, timeout_s=200.0)
for step in range(3):
    model.zero_grad()
    model(torch.randn(16, 64)).sum().backward()
assert state.error is None
print("trained", float(model.module.weight.grad.norm()))
state.close()
dist.destroy_process_group()
"""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv") or not shutil.which("unshare"),
    reason="becoming another user and taking away what can be written needs root, setpriv and unshare",
)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that everybody can enter: a read-only copy of the package, a job, and a temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="espresso-test-"))
    site = folder / "site"
    shutil.copytree(ROOT / "espresso", site / "espresso", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (site, *site.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (folder / "train.py").write_text(TRAIN)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    folder.chmod(0o755)
    yield folder
    for path in (site, *site.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    shutil.rmtree(folder)


def as_nobody(place: Path, *arguments: str, nowhere: bool = False, **variables: str) -> list[str]:
    """A command as an unknown user without a home, whose only writable folder is ``place / "tmp"``, or none at all.

    The user may read everything: the interpreter that runs the tests may lie in root's home.
    """
    reads = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
    found = os.pathsep.join([str(place / "site"), str(ROOT / "tests" / "interpreters")])
    said = {"PATH": os.environ["PATH"], "PYTHONPATH": found, "OMP_NUM_THREADS": "1", **variables}
    said["NUMBA_OPT"] = "0"  # where kernels are kept matters here, not how fast they are
    if nowhere:
        said["TORCHINDUCTOR_CACHE_DIR"] = str(place)  # without it torch itself makes a temporary folder for DDP
    else:
        said["TMPDIR"] = str(place / "tmp")
    command = ["setpriv", "--reuid", USER, "--regid", USER, "--clear-groups", *reads, "env", "-i"]
    command += [*(f"{key}={value}" for key, value in said.items()), sys.executable, *arguments]
    if not nowhere:
        return command
    sealed = [f"mount --bind {path} {path} && mount -o remount,ro,bind {path}" for path in _open_folders()]
    return ["unshare", "--mount", "sh", "-c", " && ".join([*sealed, 'exec "$@"']), "sh", *command]


def _open_folders() -> list[str]:
    """Where everybody may write, as a rule."""
    return [path for path in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock") if Path(path).is_dir()]


def finished(command: list[str], seconds: float = 500) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nowhere", [False, True])
def test_two_ranks_train(place: Path, nowhere: bool) -> None:
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = []
    for rank in range(2):
        variables = {**rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = as_nobody(place, str(place / "train.py"), nowhere=nowhere, **variables)
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, cwd="/", **pipes))
    try:
        said = [process.communicate(timeout=500) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said
    assert said[0][0] == said[1][0]
    for _, errors in said:
        assert errors.count("set NUMBA_CACHE_DIR") == 1, errors
        assert ("every process compiles them" in errors) is nowhere


KERNEL = """
import numpy as np
from espresso.cpu_offload.powersgd import add_scaled

out = np.zeros(1)
add_scaled(np.ones(1), 2.0, np.ones(1), out)
print(out[0], sum(add_scaled.stats.cache_hits.values()))
"""


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_are_kept_in_a_folder_of_the_users_own(place: Path) -> None:
    folder = place / "tmp" / f"espresso-{USER}"
    first = finished(as_nobody(place, "-c", KERNEL))
    assert first.stdout.split() == ["3.0", "0"]
    assert str(folder) in first.stderr
    assert (stat.S_IMODE(folder.stat().st_mode), str(folder.stat().st_uid)) == (0o700, USER)
    assert finished(as_nobody(place, "-c", KERNEL)).stdout.split() == ["3.0", "1"]
    folder.chmod(0o770)  # somebody else may have put code there
    opened = finished(as_nobody(place, "-c", KERNEL))
    assert opened.stdout.split() == ["3.0", "0"]
    assert "every process compiles them" in opened.stderr
    folder.chmod(0o700)


@needs_root
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("nowhere", [False, True])
def test_the_command_line_works(place: Path, nowhere: bool) -> None:
    job = job_from_trace("vgg16", 2, 2, "pcie-25g")
    job.save(place / "job.json")
    Strategy.uniform(job.tensors, job.cluster).save(place / "strategy.json")
    files = (str(place / "job.json"), str(place / "strategy.json"))
    options = ("--json",) if nowhere else ("--json", "--plot", str(place / "tmp" / "lanes.png"))
    # A simulation compiles what it needs in seconds, a search in half a minute.
    done = finished(as_nobody(place, "-m", "espresso", "simulate", *files, *options, nowhere=nowhere))
    assert ("every process compiles them" in done.stderr) is nowhere
    assert json.loads(done.stdout)["predicted_us"] > 0


def test_a_folder_that_is_not_ours_alone_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = private_folder()
    assert (folder.parent, stat.S_IMODE(folder.stat().st_mode)) == (tmp_path, 0o700)
    assert private_folder() == folder
    folder.chmod(0o755)
    with pytest.raises(PermissionError):
        private_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        private_folder()


def test_a_damaged_or_full_cache_is_a_warning(tmp_path: Path) -> None:
    """A kernel that cannot be read from the cache is compiled, and one that cannot be kept is not."""
    said = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    run = [sys.executable, "-c", KERNEL]
    subprocess.run(run, env=said, check=True, timeout=200, capture_output=True)
    (index,) = (path for path in tmp_path.rglob("*.nbi") if "add_scaled" in path.name)
    index.write_bytes(index.read_bytes()[:9])
    done = subprocess.run(run, env=said, check=True, timeout=200, capture_output=True, text=True)
    assert done.stdout.split() == ["3.0", "0"]
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1, done.stderr


def test_processes_that_want_a_kernel_at_once_compile_it_once(tmp_path: Path) -> None:
    said = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    waits = "import espresso.cpu_offload.powersgd\nprint('ready', flush=True)\ninput()\n"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, "-c", waits + KERNEL], env=said, **pipes) for _ in range(3)]
    assert [process.stdout.readline() for process in started if process.stdout] == ["ready\n"] * 3
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    hits = [process.communicate(timeout=200)[0].split()[1] for process in started]
    assert sorted(hits) == ["0", "1", "1"]


def test_a_file_system_without_locks_is_no_reason_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "lockf", refused)
    turn = Turn(str(tmp_path), "a kernel")
    assert not turn.take()
    turn.give_back()
