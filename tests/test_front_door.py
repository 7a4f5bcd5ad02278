"""What a script meets before and around its training: counts, refusals and words that name what is wrong."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed.distributed_c10d as torch_groups
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import espresso
import espresso.fsdp
from espresso.comm.environment import Launch
from espresso.comm.errors import TopologyError
from espresso.comm.parameter_server.join import _uses_mpi
from espresso.fsdp.registration import _of_shards
from espresso.launch import main
from espresso.live import observe, state
from espresso.live.artifacts import tell_profile
from espresso.live.checkpoint import Checkpoint
from espresso.strategies import Cluster, Strategy, StrategyError, TensorSpec
from tests.ddp import Played, batch, mlp, wrap
from tests.workers import run_ranks
from tests.world import IN_ONE, World, planner_of, run

TWO = Cluster(2, 1)
LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)


# -- how many steps measuring takes ------------------------------------------------------------------


def test_steps_are_counted_from_where_automatic_mode_began() -> None:
    planner = planner_of(world := World())
    assert planner.measuring(-1) == (0, 5)
    run(world, planner, range(1000, 1003), {})
    assert planner.measuring(1002) == (3, 5)
    run(world, planner, range(1003, 1005), {})
    assert planner.measuring(1004) == (5, 5)


def test_a_compressor_that_begins_late_needs_more_steps() -> None:
    planner = planner_of(world := World(), compresses_from=20)
    assert planner.measuring(-1) == (0, 20)
    run(world, planner, range(15), {})
    assert planner.measuring(14) == (15, 20)


def test_a_profile_that_begins_again_needs_its_steps_again() -> None:
    planner = planner_of(world := World())
    run(world, planner, range(5), {4: lambda: setattr(world, "buckets", IN_ONE)})
    assert planner.measuring(4) == (5, 7)


def marked(rank: int) -> list[dict[str, Any]]:
    """What a job that goes on at step 1000 tells ``espresso profile`` on the way, each rank as on a node of its own."""
    folder = Path(os.environ["ESPRESSO_JOB_PATH"])
    os.environ["ESPRESSO_JOB_PATH"] = str(folder / f"job{rank}.json")
    marker, found = folder / f"job{rank}.json.registered", []
    ddp = wrap(mlp(16, 32, 8))
    with espresso.register(ddp, "fp16", ranks_per_node=1, timeout_s=60.0) as job:
        found.append(json.loads(marker.read_text()))
        job.load_state_dict(replace(Checkpoint.parse(job.state_dict()), step=1000).to_dict())
        for step in range(13):
            ddp(batch(rank, step, 16)).sum().backward()
            found.append(json.loads(marker.read_text()))
        found.append({"written": (folder / f"job{rank}.json").exists()})
    return found


def test_profile_is_told_the_steps_of_this_run(tmp_path: Path) -> None:
    environment = {"ESPRESSO_PROFILE_ONLY": "1", "ESPRESSO_JOB_PATH": str(tmp_path)}
    for outcome in run_ranks(marked, 2, environment=environment, deadline_s=240.0):
        *marks, end = outcome.value
        assert [each["steps"] for each in marks] == [*range(13), 12]
        assert {each["needed"] for each in marks} == {12}
        assert {each["writes_here"] for each in marks} == {end["written"]} == {outcome.rank == 0}


def test_what_two_nodes_tell_at_one_place_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPRESSO_JOB_PATH", str(tmp_path / "job.json"))
    marker = tmp_path / "job.json.registered"
    bodies = [{"steps": 1, "writes_here": False}, {"steps": 1, "writes_here": True}]
    tell_profile(**bodies[0])

    def tell(body: dict[str, Any]) -> None:
        for _ in range(500):
            tell_profile(**body)

    with ThreadPoolExecutor(2) as nodes:
        telling = [nodes.submit(tell, body) for body in bodies]
        while not all(each.done() for each in telling):
            assert json.loads(marker.read_text()) in bodies
        for each in telling:
            each.result()
    assert os.listdir(tmp_path) == [marker.name]


# -- signals of espresso profile ---------------------------------------------------------------------

COUNTS = """
import os, signal, time
os.setsid()  # what the terminal sends to its foreground goes past it: signals that come at once would be seen as one
came = []
signal.signal(signal.SIGINT, lambda *_: came.append(1))
open("ready", "w").close()
until = time.monotonic() + 20
while not came and not os.path.exists("over") and time.monotonic() < until:
    time.sleep(0.01)
print(f"forwarded: {len(came)}", flush=True)
"""


def interrupted(folder: Path, stdin: str, how: str) -> str:
    """What a profiled command said that was interrupted once, with stdin redirected as the shell says."""
    (folder / "counts.py").write_text(COUNTS)
    shell = f"exec {sys.executable} -m espresso profile -- {sys.executable} counts.py {stdin}"
    argv = ["sh", "-c", shell]
    if how == "terminal":  # one of its own
        argv = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *argv]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(argv, cwd=folder, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        until = time.monotonic() + 60
        while not (folder / "ready").exists():
            assert time.monotonic() < until
            time.sleep(0.02)
        if how == "terminal":
            process.stdin.write(b"\x03")
            process.stdin.flush()
            time.sleep(1.0)
            (folder / "over").touch()
        else:
            process.send_signal(signal.SIGINT)
        return str(process.stdout.read().decode())


@pytest.mark.parametrize("stdin", ["", "</dev/null", "<&-"])
@pytest.mark.parametrize(("how", "forwarded"), [("terminal", 0), ("kill", 1)])
def test_an_interrupt_is_forwarded_unless_the_terminal_has_sent_it(
    tmp_path: Path, stdin: str, how: str, forwarded: int
) -> None:
    said = interrupted(tmp_path, stdin, how)
    assert f"forwarded: {forwarded}" in said
    assert "Traceback" not in said


# -- strategies of other FSDP models -----------------------------------------------------------------

WHOLES = (TensorSpec("weight", (5, 4)), TensorSpec("bias", (8,)))


def over_shards(*tensors: TensorSpec, here: Sequence[TensorSpec] = WHOLES) -> Strategy:
    make = _of_shards("none", Strategy.uniform(tensors, TWO), WHOLES)
    assert callable(make)
    return make(tuple(here), TWO)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (
            [TensorSpec("weight", (5, 4), "bfloat16"), WHOLES[1]],
            r"is float32\[5, 4\] in the model but bfloat16",
        ),
        ([TensorSpec("weight", (5, 8)), WHOLES[1]], r"'weight' is float32\[5, 4\] in the model but float32\[5, 8\]"),
        ([TensorSpec("weight", (6, 4)), WHOLES[1]], r"'weight' is float32\[5, 4\] in the model but float32\[6, 4\]"),
        ([TensorSpec("weight", (20,)), WHOLES[1]], r"'weight' is float32\[5, 4\] in the model but float32\[20\]"),
        ([*WHOLES, TensorSpec("head", (8,))], "'head' is in the strategy but not in the model"),
        (WHOLES[:1], "'bias' of the model is not in the strategy"),
    ],
)
def test_a_strategy_of_another_model_is_refused_by_name(tensors: Sequence[TensorSpec], says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        over_shards(*tensors)


def test_a_strategy_of_wholes_and_one_of_shards_are_taken() -> None:
    shard = (TensorSpec("weight", (3, 4)), TensorSpec("bias", (4,)))
    assert over_shards(*WHOLES, here=shard).tensors == shard
    assert over_shards(*shard, here=shard).tensors == shard


def off_and_sharded(rank: int) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh["shard"])
    return repr(espresso.fsdp.register(model, mesh["replicate"]))


def test_profile_is_told_that_espresso_is_off(tmp_path: Path) -> None:
    environment = {"ESPRESSO_DISABLE": "1", "ESPRESSO_JOB_PATH": str(tmp_path / "job.json")}
    for outcome in run_ranks(off_and_sharded, 2, environment=environment):
        assert "off (ESPRESSO_DISABLE=1)" in outcome.value
    told = json.loads((tmp_path / "job.json.registered").read_text())
    assert told == {"why_not": "espresso is off (ESPRESSO_DISABLE=1)"}


# -- MPI that is not there ---------------------------------------------------------------------------


class Broken(ModuleType):
    """mpi4py without the library that it loads."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("cannot load MPI library")


@pytest.mark.parametrize(
    ("there", "says"), [(None, "mpi4py"), (Broken("mpi4py"), "cannot load MPI library")], ids=["no mpi4py", "no MPI"]
)
def test_without_mpi_there_is_gloo_or_a_line_that_says_what_is_missing(
    there: ModuleType | None,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_launcher: None,
) -> None:
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", there)  # type: ignore[arg-type]
    assert not _uses_mpi(Launch("openmpi", 0, 2, 0, 2, None), "auto")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert main(["--servers", "1", "--transport", "mpi", "train.py"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("espresso.launch: --transport mpi needs mpi4py and an MPI library")
    assert says in said


# -- espresso.observe --------------------------------------------------------------------------------


def observed_wrongly(rank: int) -> list[str]:
    """What is refused, with no group left open after it."""
    ddp, said = wrap(mlp(16, 32, 8)), []

    def refused(**settings: Any) -> None:
        before = set(torch_groups._world.pg_map)
        try:
            espresso.observe(ddp, **settings)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        assert set(torch_groups._world.pg_map) == before

    refused(artifacts_dir=3)
    os.environ["ESPRESSO_TIMEOUT_S"] = "-1"
    refused()
    os.environ["ESPRESSO_TIMEOUT_S"] = "20"
    kept, observe.own_folder = observe.own_folder, _fails
    refused()
    observe.own_folder = kept
    return said


def _fails(*_: object) -> None:
    raise OSError("the disk is gone")


def observed_from_outside(rank: int) -> tuple[int, str, float]:
    """What an observed job takes from the environment."""
    os.environ |= {"ESPRESSO_RANKS_PER_NODE": "1", "ESPRESSO_ARTIFACTS_DIR": "outside", "ESPRESSO_TIMEOUT_S": "20"}
    watch = espresso.observe(wrap(mlp(16, 32, 8)), "inside")
    folder, watch._artifacts_dir = watch._artifacts_dir, None
    watch.close()
    return watch._groups.cluster.num_nodes, str(folder), watch._groups.timeout_s


def test_a_state_that_is_bound_again_leaves_nothing_at_the_model() -> None:
    model = nn.Linear(4, 4)
    state = espresso.EspressoState("none").bind(model).bind(model)
    assert len(model._forward_pre_hooks) == 1
    state.close()
    assert not model._forward_pre_hooks


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(__name__, (observed_wrongly, observed_from_outside), 2)


def test_observe_refuses_what_is_wrong_and_leaves_no_group(played: Played) -> None:
    for said in played(observed_wrongly):
        assert said[0] == "TypeError: artifacts_dir must be a path or None, got 3 (int)"
        assert said[1] == "ValueError: ESPRESSO_TIMEOUT_S must be a number above 0 and up to 1e+06, got '-1'"
        assert said[2] == "OSError: the disk is gone"


def test_observe_takes_settings_from_outside(played: Played) -> None:
    for found in played(observed_from_outside):
        assert found == (2, "outside", 20.0)


# -- models that train apart -------------------------------------------------------------------------


def test_a_bare_model_beside_others_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_launcher: None
) -> None:
    espresso.register(nn.Linear(4, 4))
    assert not caplog.records
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert espresso.register(nn.Linear(4, 4)).is_off
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "openmpi says that this is rank 1 of 4" in record.getMessage()


def test_a_world_size_that_is_no_number_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, no_launcher: None
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "x")
    says = "environment variable WORLD_SIZE is 'x', expected a whole number"
    with pytest.raises(TopologyError, match=says):
        espresso.register(nn.Linear(4, 4))
    unbound, bound = espresso.EspressoState("none"), espresso.EspressoState("none").bind(nn.Linear(4, 4))
    monkeypatch.setattr(state, "_LIVE", [unbound, bound])
    state._close_all()
    assert bound.is_closed
    assert says in caplog.text
