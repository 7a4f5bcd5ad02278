"""``python -m espresso.launch``: real processes of real launchers, a DDP script that knows nothing of servers."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.ports import free_port
from espresso.launch import main, parse

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import atexit, gc, json, os, sys
gc.disable(); atexit.register(gc.freeze)  # not for the test: DDP loads what takes seconds to look through at the end
import torch, torch.distributed as dist
import espresso
from espresso.live.checkpoint import Checkpoint
from espresso.optim import scale_residuals
from espresso.optim.exchange import TwoWay
from espresso.strategies import CompressorSpec

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 30))
spec = CompressorSpec("efsignsgd")
state = espresso.register(ddp, compressor=spec, strategy=TwoWay(spec, raw_below_bytes=1000), timeout_s=60)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
scale_residuals(state, optimizer)
weight, mine = ddp.module.weight, torch.Generator().manual_seed(dist.get_rank())
start, moved, rates = weight.detach().double(), 0.0, (0.5, 0.125, 0.25, 1.0)
for rate in rates:
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    inputs = torch.randn(8, 300, generator=mine)
    ddp(inputs).sum().backward()  # a gradient that does not depend on the parameters
    moved += rate * inputs.double().sum(0) / 2
    optimizer.step()
state.check_replicas()
def summed(saved):
    kept = {"local": torch.zeros(9000), "server": torch.zeros(9000)}
    for row in Checkpoint.parse(saved).rows():
        kept[row.site.value][row.start : row.start + row.values.size] += torch.from_numpy(row.values)
    return kept
mine_alone, everybody = summed(state.state_dict()), state.gather_state_dict()
kept = summed(everybody)
state.load_state_dict(everybody)  # the server forgets, and is given what it kept by each worker
again = summed(state.gather_state_dict())
dist.all_reduce(moved)
missing = (weight.detach().double() - start + moved).flatten() / rates[-1]
off = float((missing - (kept["local"] + kept["server"]) / 2).abs().max())
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
body = {"env": [os.environ[name] for name in names], "world": dist.get_world_size(), "arguments": sys.argv[1:],
        "servers": state.cluster.num_servers, "colocated": state.cluster.colocated,
        "share": int(mine_alone["server"].count_nonzero()) / int(kept["server"].count_nonzero()),
        "again": all(torch.equal(again[site], kept[site]) for site in kept),
        "off": off, "at_the_server": float(kept["server"].abs().max()),
        "through": state.metrics()["espresso/tensors_through_servers"]}
with open(os.path.join(sys.argv[1], f"{dist.get_rank()}.json"), "w") as file:
    json.dump(body, file)
state.close()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def check(folder: Path, rank: int) -> None:
    body = json.loads((folder / f"{rank}.json").read_text())
    assert body["env"] == [str(rank), "2", str(rank), "2"]
    assert (body["world"], body["servers"], body["colocated"]) == (2, 1, True)
    assert body["arguments"] == [str(folder), "--servers", "mine"]  # what follows the script is the script's
    assert body["through"] == 1
    # Rates changed: SGD's movement is conserved only if the server rescales what it keeps.
    assert body["off"] < 1e-3 < 0.1 < body["at_the_server"]
    assert body["again"]
    assert 0.4 < body["share"] < 0.6, "each worker saves a share of what the server keeps"


def environment() -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_"))}
    return {**clean, "OMP_NUM_THREADS": "1"}


def command(script: Path, folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "espresso.launch", "--servers", "1", "--timeout-s", "60", str(script), str(folder),
        "--servers", "mine",
    ]  # fmt: skip


def over_gloo(argv: list[str], timeout_s: float = 100.0) -> list[tuple[int, str]]:
    """Three processes with the variables of torchrun: exit status and standard error of each."""
    port = free_port()
    processes = []
    for rank in range(3):
        env = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": port}
        variables = {**environment(), "MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in env.items()}}
        processes.append(subprocess.Popen(argv, env=variables, stderr=subprocess.PIPE))
    try:
        return [
            (process.wait(), error)
            for process in processes
            for error in [process.communicate(timeout=timeout_s)[1].decode()]
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()


MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed")


def over_mpi(argv: list[str], *flags: str) -> subprocess.CompletedProcess[str]:
    """The same under mpirun."""
    argv, env = under_mpirun(argv, *flags)
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=100, check=False)


def under_mpirun(argv: list[str], *flags: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment."""
    pytest.importorskip("mpi4py")
    allowed = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "MASTER_PORT": str(free_port()),
    }
    return [str(MPIRUN), "--oversubscribe", *flags, "-np", "3", *argv], {**environment(), **allowed}


def test_three_processes_over_gloo_are_two_workers_and_a_server(script, tmp_path):
    ends = over_gloo(command(script, tmp_path))
    assert [status for status, _ in ends] == [0, 0, 0], ends
    check(tmp_path, 0)
    check(tmp_path, 1)


@needs_mpirun
def test_three_processes_over_mpi_are_two_workers_and_a_server(script, tmp_path):
    done = over_mpi(command(script, tmp_path))
    assert done.returncode == 0, done.stderr
    check(tmp_path, 0)
    check(tmp_path, 1)


# -- what people see when something fails ----------------------------------------------------------

CLOSED = """
import os, sys, time
import espresso.comm.parameter_server.join as join
from espresso.launch import main

rank = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
if rank == "1":
    class Late(join.StoreMail):
        def swap(self, number, mine, to, sources):
            super().swap(number, mine, to, ())
            time.sleep(1.0)  # rank 0, which has the store, finds out first, and fails
            return super().swap(number, mine, (), sources)

    join.StoreMail = Late
if rank == "2":
    class Closed(join.Door):
        def __init__(self, *args):
            super().__init__(*args)
            self.close()  # nobody can come in, as behind a firewall

    join.Door = Closed
sys.exit(main(["--servers", "1", "--timeout-s", "60", "train.py"]))
"""
UNREACHABLE = r"espresso.launch: worker rank \d cannot reach server rank 2 at \d+\.\d+\.\d+\.\d+:\d+ \("


@pytest.fixture
def closed(tmp_path):
    path = tmp_path / "closed.py"
    path.write_text(CLOSED)
    return [sys.executable, str(path)]


def test_an_unreachable_server_is_named_over_gloo(closed):
    ends = over_gloo(closed)
    for status, error in ends[:2]:
        assert status == 1
        assert re.search(UNREACHABLE, error), error
    assert ends[2][0] != 0


DEATH = """
import os, signal, sys
import torch, torch.distributed as dist
import espresso
from espresso.optim.exchange import TwoWay
from espresso.strategies import CompressorSpec

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, folder, victim = dist.get_rank(), sys.argv[1], int(sys.argv[2])
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 30))
spec = CompressorSpec("efsignsgd")
espresso.register(ddp, compressor=spec, strategy=TwoWay(spec, raw_below_bytes=0), timeout_s=2)
for step in range(20):
    if step == 10 and rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 10 and rank == 0 and victim == 2:
        os.kill(int(open(os.path.join(folder, "pid 2")).read()), signal.SIGKILL)
    try:
        ddp(torch.randn(8, 300)).square().mean().backward()
    except Exception as error:
        with open(os.path.join(folder, f"{rank}.txt"), "w") as file:
            file.write(str(error))
        raise
"""
STARTER = """
import os, sys
from espresso.launch import main

rank = os.environ["OMPI_COMM_WORLD_RANK"]
with open(os.path.join(sys.argv[1], f"pid {rank}"), "w") as file:
    file.write(str(os.getpid()))
script = os.path.join(sys.argv[1], "death.py")
sys.exit(main(["--servers", "1", "--timeout-s", "30", script, *sys.argv[1:]]))
"""
SURVIVE = ("--runtime-options", "recoverable,continuous,error-nonzero-status=false")
"""With these mpirun leaves the others running when a process dies."""


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize(
    ("victim", "survivors", "said"),
    [
        (
            1,
            [0],
            r"server rank 2 .*reports: worker rank 1 died, left or hangs while key \d+ \(.* waited for its push",
        ),
        (2, [0, 1], r"server rank 2 .*did not answer the push of key \d+ .*no message within 2 s"),
    ],
)
def test_who_dies_under_mpi_is_named_with_a_key_by_the_others(tmp_path, victim, survivors, said):
    (tmp_path / "death.py").write_text(DEATH)
    (tmp_path / "start.py").write_text(STARTER)
    argv = [sys.executable, str(tmp_path / "start.py"), str(tmp_path), str(victim)]
    argv, env = under_mpirun(argv, *SURVIVE)
    with (tmp_path / "errors").open("wb") as errors:
        mpirun = subprocess.Popen(argv, env=env, stdout=errors, stderr=errors)
    try:
        wait_until(lambda: mpirun.poll() is not None or all(is_gone(rank, tmp_path) for rank in range(3)), 120.0)
        with suppress(subprocess.TimeoutExpired):  # in this mode mpirun itself now and then waits for nobody
            mpirun.wait(5.0)
    finally:
        mpirun.kill()
        mpirun.wait()
    printed = (tmp_path / "errors").read_text()
    wait_until(lambda: all(is_gone(rank, tmp_path) for rank in range(3)), 60.0)
    for rank in survivors:
        assert (tmp_path / f"{rank}.txt").exists(), printed
        text = (tmp_path / f"{rank}.txt").read_text()
        assert re.search(said, text), (text, printed)


@needs_mpirun
def test_a_script_that_gives_up_ends_an_mpi_job_in_which_another_rank_hangs(tmp_path):
    """MPI's orderly end would wait for it."""
    script = tmp_path / "gives_up.py"
    script.write_text("import os, sys, time\ntime.sleep(60) if os.environ['RANK'] == '1' else sys.exit(3)")
    began = time.monotonic()
    done = over_mpi([sys.executable, "-m", "espresso.launch", "--servers", "1", str(script)])
    assert done.returncode == 3, done.stderr
    assert time.monotonic() - began < 30


def is_gone(rank: int, folder: Path) -> bool:
    """Whether the rank has been and ended; somebody else may still have to ask how."""
    path = folder / f"pid {rank}"
    if not path.exists() or not (pid := path.read_text()):
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(true: Callable[[], bool], deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < deadline, f"nothing came to an end within {deadline_s:.0f} s"
        time.sleep(0.1)


HELD_UP = """
import atexit, sys, time
from espresso.comm.parameter_server.join import Joined, ServerSettings

sys.modules[Joined.__module__]._LAST_S = 1.0
atexit.register(time.sleep, 100)
joined = Joined(None, 1, None, ServerSettings(servers=1), False)
try:
    raise ValueError("what went wrong")
except ValueError as error:
    joined.report_and_abandon(error)
"""


def test_an_end_that_is_held_up_is_cut_off():
    done = subprocess.run([sys.executable, "-c", HELD_UP], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "ValueError: what went wrong" in done.stderr
    assert "Timeout" in done.stderr
    assert "report_and_abandon" in done.stderr.partition("Timeout")[2], done.stderr


def test_outside_a_launcher_it_says_how_to_start(monkeypatch, capsys):
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "SLURM")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    assert main(["--servers", "1", "train.py"]) == 1
    assert "espresso.launch runs inside a launcher: torchrun" in capsys.readouterr().err


def test_the_number_of_servers_is_needed(capsys):
    with pytest.raises(SystemExit):
        parse(["train.py"])
    assert "--servers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("--connections", "0", "1 to 16, got 0"),
        ("--engines", "0", "above 0"),
        ("--timeout-s", "0", "above 0 and up to 1e+06 s, got 0"),
        ("--timeout-s", "inf", "above 0 and up to 1e+06 s, got inf"),
        ("--timeout-s", "nan", "got nan"),
    ],
)
def test_settings_out_of_range_are_said_without_a_traceback(
    capsys: pytest.CaptureFixture[str], setting: str, value: str, said: str
) -> None:
    assert main(["--servers", "1", setting, value, "train.py"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("espresso.launch: ")
    assert said in told
