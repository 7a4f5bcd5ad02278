"""The end of a job: exit, ``destroy_process_group`` and ``close`` in any order, forked data loaders, no litter.

Each way to end is a program of its own, since what counts is how the interpreter exits.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.ports import free_port

ROOT = Path(__file__).parents[1]
DEADLINE_S = 150.0

LAUNCHER = """
import json, os, signal, sys, time
import benchmarks.rank_preload  # loaded once instead of by every program: minutes of a core

def is_stopped(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"

deadline_s, program = float(sys.argv[1]), None
while program is None and (folder := sys.stdin.readline().rstrip()):
    with open(os.path.join(folder, "programs.json")) as file:
        programs = json.load(file)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not live through the fork"
    running = {}
    for name, path, environment in programs:
        pid = os.fork()
        if pid == 0:
            program = path
            break
        running[pid] = name
    if program is not None:
        break
    ended, deadline = {}, time.monotonic() + deadline_s
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ended[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > deadline:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            ended.update(dict.fromkeys(running.values()))
            break
        elif all(map(is_stopped, running)):  # all others have ended
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        else:
            time.sleep(0.05)
    with open(os.path.join(folder, "ended.json"), "w") as file:
        json.dump(ended, file)
    print(folder, flush=True)
if program is not None:
    # From here on this is the program: it goes out through the end of the main module, as any other.
    os.environ.update(environment)
    for descriptor, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{ending}", os.O_WRONLY | os.O_CREAT), descriptor)
    del running, programs
    with open(program) as file:
        text = file.read()
    exec(compile(text, program, "exec"))
"""
"""Starts the programs of each folder that it is told of, and waits for their ends."""

SCRIPT = """
import gc, sys, threading, time, warnings
from pathlib import Path
warnings.simplefilter("error")
import torch, torch.distributed as dist
import espresso
from tests.ddp import SHARDED, agreed, batch, mlp, sgd, strategy_for, wrap
from espresso.strategies import Cluster

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = wrap(mlp(20, 60, 30, 40, 5))

def register(ddp):
    strategy = strategy_for(ddp, Cluster(2, 1), SHARDED, "efsignsgd")
    return espresso.register(ddp, strategy=strategy, ranks_per_node=1, timeout_s=20.0)

def steps(num, data=None):
    for step in range(num):
        ddp(batch(rank, step, 20) if data is None else next(data)).square().mean().backward()
        sgd(ddp)
        ddp.zero_grad()
    assert agreed(ddp)

def gloo_threads():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("pt_gloo_runloop")

threads_before = gloo_threads()
state = register(ddp)
steps(3)
"""

ENDINGS = {
    "just exits": "",
    "destroy, then close": "dist.destroy_process_group()\nstate.close()",
    "close, then destroy": """
        running = gloo_threads()
        state.close()
        state.close()
        # A thread that has to let go of a callback while the interpreter ends would abort the process.
        assert gloo_threads() == threads_before < running
        try:
            state.gather_state_dict()
        except RuntimeError as error:
            assert "espresso is closed" in str(error), error
        else:
            raise AssertionError("a closed state talked to the others")
        dist.destroy_process_group()
    """,
    "leaves by sys.exit in the middle of a step": """
        ddp(batch(rank, 9, 20)).square().mean()
        sys.exit(0)
    """,
    "a thread of Gloo's is slow to let go of a callback": """
        import espresso.comm.execute.averaging as averaging

        class Slow:
            def __del__(self, sleep=time.sleep):
                sleep(0.3)

        made = []

        def partial(function, *arguments):
            made.append(function)
            return lambda future, slow=Slow(): function(*arguments, future)

        averaging.partial = partial
        ddp = wrap(mlp(20, 60, 30, 40, 5))
        issued = espresso.register(ddp, strategy=strategy_for(ddp, Cluster(2, 1)), ranks_per_node=1, timeout_s=20.0)
        steps(8)
        assert made
    """,
    "forked data loader": """
        from torch.utils.data import DataLoader
        numbers = torch.arange(160 * 20, dtype=torch.float32).reshape(160, 20).sin()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads
            loader = DataLoader(numbers, batch_size=8, num_workers=2, multiprocessing_context="fork")
            for _ in range(2):
                steps(20, iter(loader))
        persistent = DataLoader(
            numbers, batch_size=8, num_workers=2, multiprocessing_context="fork", persistent_workers=True
        )
        data = iter(persistent)
        steps(5, data)
    """,
    "two models, one closed, one dropped": """
        first = state.metrics()
        state.close()
        try:
            steps(1)
        except RuntimeError as error:
            assert "this espresso state is closed" in str(error), error
        else:
            raise AssertionError("a closed state took part")
        ddp = wrap(mlp(20, 60, 30, 40, 5))
        state = register(ddp)
        steps(3)
        assert state.metrics()["espresso/bytes_sent"] == first["espresso/bytes_sent"]
        del ddp
        gc.collect()
        assert state.metrics()["espresso/steps"] == 3.0
        del state
        gc.collect()
        for _ in range(100):
            left = [t.name for t in threading.enumerate() if t.name.startswith("espresso-")]
            if not left:
                break
            time.sleep(0.1)
        assert not left, left
        dist.destroy_process_group()
    """,
}


DEATH = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
import espresso
from tests.ddp import HIERARCHICAL, batch, mlp, sgd, strategy_for, wrap
from espresso.strategies import Cluster

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = wrap(mlp(20, 60, 30, 40, 5))
strategy = strategy_for(ddp, Cluster(2, 2), HIERARCHICAL, "efsignsgd")
state = espresso.register(ddp, strategy=strategy, ranks_per_node=2, timeout_s=20.0)

def train():
    for step in range(40):
        ddp.zero_grad()
        ddp(batch(rank, step, 20)).square().mean().backward()
        sgd(ddp)
        if step == 4 and rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)

def caught():
    try:
        train()
    except RuntimeError as error:
        assert "rank 3" in str(state.error).lower(), state.error  # dead, or silent
        return
    raise AssertionError("nobody missed rank 3")
"""

CTRL_C = """
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it from its start
os.kill(os.getpid(), signal.SIGINT)
while True:
    time.sleep(0.1)
"""
AFTER_A_DEATH = {
    "the error ends the script": (1, "train()"),
    "exits": (0, "caught()"),
    "closes": (0, "caught()\nstate.close()"),
    "closes, destroys": (0, "caught()\nstate.close()\ndist.destroy_process_group()"),
    "destroys, closes": (0, "caught()\ndist.destroy_process_group()\nstate.close()"),
    "a thread leaves by sys.exit": (0, "caught()\nthread = threading.Thread(target=sys.exit)\nthread.start()"),
    "goes on in another job of the same model, and leaves the first one open": (
        0,
        """
caught()
first, optimizer = state, torch.optim.SGD(ddp.parameters(), lr=0.125)
try:
    optimizer.step()
except espresso.EspressoError as error:
    assert error is state.error
else:
    raise AssertionError("what was not averaged was applied")
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{program}.store", rank=rank, world_size=3)
ddp = wrap(ddp.module)
state = espresso.register(ddp, strategy=strategy_for(ddp, Cluster(3, 1)), ranks_per_node=1, timeout_s=20.0)
train()
optimizer.step()
state.close()
dist.destroy_process_group()
""",
    ),
    "Ctrl-C": (-signal.SIGINT, f"caught()\n{CTRL_C}"),
}
"""Exit code of the survivors, and what they do."""


STOPPED = """
import faulthandler, os, signal
import torch, torch.distributed as dist
import espresso
from espresso.live.codecs import HostCodecs
from tests.ddp import SHARDED, mlp, strategy_for, wrap
from espresso.strategies import Cluster

torch.set_num_threads(1)
dist.init_process_group("gloo")
ddp = wrap(mlp(20, 60, 5))

def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)

if dist.get_rank() == 1:
    HostCodecs.warm_up = stop
try:
    strategy = strategy_for(ddp, Cluster(3, 1), SHARDED, "efsignsgd")
    espresso.register(ddp, strategy=strategy, ranks_per_node=1, timeout_s=4.0)
except espresso.EspressoError as error:
    assert "the ranks' barrier" in str(error), error
    assert "rank 1 does not answer" in str(error).lower(), error
    faulthandler.dump_traceback_later(15.0, exit=True)
else:
    raise AssertionError("nobody missed rank 1")
"""
"""Ranks wait for kernels to be compiled, and one of them stops: the others end all the same."""


@pytest.fixture(scope="module")
def launcher() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LAUNCHER, str(DEADLINE_S)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        yield process


@pytest.fixture(scope="module")
def ended(
    launcher: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int | None, str, str]]]:
    """How both ranks of every program ended: exit code (None: killed at the deadline), output, errors."""
    programs = {name: SCRIPT + textwrap.dedent(ending) for name, ending in ENDINGS.items()}
    return run_to_their_ends(launcher, tmp_path_factory.mktemp("endings"), programs, 2)


def run_to_their_ends(
    launcher: subprocess.Popen[str], folder: Path, programs: dict[str, str], num_ranks: int
) -> dict[str, list[tuple[int | None, str, str]]]:
    """Start all programs at once, each with so many ranks: most of their time is waiting for each other."""
    started = []
    for number, text in enumerate(programs.values()):
        path = folder / f"{number}.py"
        path.write_text(text)
        port = free_port()
        for rank in range(num_ranks):
            started.append((str(folder / f"{number}-{rank}"), str(path), launched(rank, num_ranks, port)))
    (folder / "programs.json").write_text(json.dumps(started))
    assert launcher.stdin is not None
    assert launcher.stdout is not None
    launcher.stdin.write(f"{folder}\n")
    assert launcher.stdout.readline() == f"{folder}\n", "the launcher has ended"
    codes = json.loads((folder / "ended.json").read_text())
    results: dict[str, list[tuple[int | None, str, str]]] = {name: [] for name in programs}
    for position, (name, _, _) in enumerate(started):
        printed = [Path(f"{name}.{ending}").read_text() for ending in ("out", "err")]
        results[list(programs)[position // num_ranks]].append((codes[name], printed[0], printed[1]))
    return results


def launched(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.mark.parametrize("name", ENDINGS)
def test_a_job_ends_cleanly(ended, name):
    for rank, (code, output, errors) in enumerate(ended[name]):
        assert code == 0, f"rank {rank} ended with {code}:\n{errors}"
        assert output == ""
        assert errors == ""


@pytest.fixture(scope="module")
def survived(
    launcher: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[int | None, str, str]]]:
    programs = {name: DEATH + ending for name, (_, ending) in AFTER_A_DEATH.items()}
    return run_to_their_ends(launcher, tmp_path_factory.mktemp("deaths"), programs, 4)


@pytest.mark.parametrize("name", AFTER_A_DEATH)
def test_survivors_of_a_death_end_cleanly(survived, name):
    """No abort by a thread that comes back from the library while the interpreter ends."""
    wanted, _ = AFTER_A_DEATH[name]
    for rank, (code, _, errors) in enumerate(survived[name]):
        assert code == (wanted if rank < 3 else -signal.SIGKILL), f"rank {rank} ended with {code}:\n{errors}"
        assert "terminate called" not in errors, errors


@pytest.mark.slow
def test_survivors_of_a_start_end_though_a_rank_is_stopped(launcher, tmp_path):
    outcomes = run_to_their_ends(launcher, tmp_path, {"a start": STOPPED}, 3)["a start"]
    for rank in (0, 2):
        code, _, errors = outcomes[rank]
        assert code == 0, f"rank {rank} ended with {code}:\n{errors}"
