"""``python -m espresso.launch``: real processes of real launchers, a DDP script that knows nothing of servers."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from espresso.launch import main, parse

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import json, os, sys
import torch, torch.distributed as dist
import espresso
from espresso.optim.exchange import TwoWay
from espresso.strategies import CompressorSpec

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 30))
spec = CompressorSpec("efsignsgd")
state = espresso.register(ddp, compressor=spec, strategy=TwoWay(spec, raw_below_bytes=1000), timeout_s=60)
optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for _ in range(4):
    optimizer.zero_grad()
    ddp(torch.randn(8, 300)).square().mean().backward()
    optimizer.step()
state.check_replicas()
sites = {row["site"] for row in state.state_dict()["residuals"]}
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
body = {"env": [os.environ[name] for name in names], "world": dist.get_world_size(), "arguments": sys.argv[1:],
        "servers": state.cluster.num_servers, "colocated": state.cluster.colocated, "sites": sorted(sites),
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
    assert body["sites"] == (["local", "server"] if rank == 0 else ["local"])


def environment() -> dict[str, str]:
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("OMPI_", "PMI", "RANK", "WORLD_SIZE", "LOCAL_"))
    }
    return {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(script: Path, folder: Path) -> list[str]:
    return [
        sys.executable, "-m", "espresso.launch", "--servers", "1", "--timeout-s", "60", str(script), str(folder),
        "--servers", "mine",
    ]  # fmt: skip


def test_three_processes_over_gloo_are_two_workers_and_a_server(script, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(3):
        env = {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3, "MASTER_PORT": port}
        variables = {**environment(), "MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in env.items()}}
        processes.append(subprocess.Popen(command(script, tmp_path), env=variables, stderr=subprocess.PIPE))
    errors = [process.communicate(timeout=100)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    check(tmp_path, 0)
    check(tmp_path, 1)


@pytest.mark.skipif(
    shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") is None,
    reason="mpirun is not installed",
)
def test_three_processes_over_mpi_are_two_workers_and_a_server(script, tmp_path):
    pytest.importorskip("mpi4py")
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    argv = [str(mpirun), "--oversubscribe", "-np", "3", *command(script, tmp_path)]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        argv, env={**environment(), **allowed}, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    check(tmp_path, 0)
    check(tmp_path, 1)


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
