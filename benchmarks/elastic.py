"""torchrun's elastic restarts: a job of 4, 4, 2, 3 and 4 ranks, each time from the latest whole checkpoint.

    python -m benchmarks.elastic

Four agents of one rank each, on this machine. A worker is killed, and torchrun starts all four again; two agents are
killed; one comes back; another comes back. Workers load the latest checkpoint (torch.distributed.checkpoint) and train
on, as any elastic script does. Checked:

- what all ranks owe, divided by their number, is what it was when it was saved (to 1e-6 of its largest number);
- on as many ranks as saved it, the same steps give the same bits;
- replicas are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from benchmarks.exchange import digest
from benchmarks.lasting import Job, latest, say
from benchmarks.ports import free_port
from benchmarks.results import RESULTS_DIR, record, write
from espresso.live.checkpoint import Checkpoint
from espresso.live.parts import RESIDUAL

ROOT = Path(__file__).resolve().parents[1]
EVERY = 5
"""Steps between checkpoints."""

LAW = 1e-6
PATIENCE_S = 180.0
RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5"

Row = dict[str, Any]


# -- a worker --------------------------------------------------------------------------------------


def work(folder: Path, width: int) -> None:
    """One rank: go on from the latest checkpoint, train and save until the end comes."""
    torch.set_num_threads(1)
    (folder / f"worker{os.environ['AGENT']}").write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    job, path = Job(rank, width), latest(folder)
    if path is not None:
        load(job.parts(), checkpoint_id=path)
        job.step = int(path.name)
        now, then = owed(job), torch.load(folder / f"owed{path.name}.pt", weights_only=True)
        most = max(float(values.abs().max()) for values in then.values())
        moved = max(float((now[name] - values).abs().max()) for name, values in then.items())
        note(folder, {"size": size, "from": job.step, "owed": most, "moved": moved / most})
    while True:
        job.train()
        job.state.check_replicas()
        note(folder, {"size": size, "step": job.step, "digest": digest(job.model.parameters())})
        if job.step % EVERY == 0:
            now = owed(job)
            if rank == 0:
                torch.save(now, folder / f"owed{job.step}.pt")
            save(job.parts(), checkpoint_id=folder / str(job.step))


def owed(job: Job) -> dict[str, torch.Tensor]:
    """The part of the average that was not sent yet, by tensor (a collective)."""
    checkpoint = Checkpoint.parse(job.state.gather_state_dict())
    kept = {tensor.name: torch.zeros(tensor.numel, dtype=torch.float64) for tensor in checkpoint.model}
    for row in checkpoint.rows():
        if row.held == RESIDUAL:
            kept[row.tensor][row.start : row.start + row.values.size] += torch.from_numpy(row.values)
    return {name: values / dist.get_world_size() for name, values in kept.items()}


def note(folder: Path, row: Row) -> None:
    """What the first rank saw; the others say nothing."""
    if dist.get_rank() == 0:
        with (folder / "log").open("a") as log:
            log.write(json.dumps({"life": os.getpid(), **row}) + "\n")


# -- the agents ------------------------------------------------------------------------------------


class Agents:
    """torchrun, as it is started on several hosts."""

    def __init__(self, folder: Path, width: int) -> None:
        self.folder, self._width, self._port = folder, width, free_port()
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *numbers: int) -> None:
        """The first one holds the rendezvous."""
        for number in numbers:
            argv = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2:4", "--nproc-per-node", "1"]
            argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "elastic"]
            conf = f"{RENDEZVOUS},is_host={int(number == 0)}"  # else whoever binds the port first, who may be killed
            argv += ["--rdzv-conf", conf, "--local-addr", "127.0.0.1", "--max-restarts", "100"]
            argv += ["--monitor-interval", "0.2", "-m", "benchmarks.elastic"]
            argv += ["--worker", str(self.folder), "--width", str(self._width)]
            environment = os.environ | {"AGENT": str(number), "OMP_NUM_THREADS": "1"}
            # PyTorch's store is otherwise the agents', with what the ranks of the last round left in it.
            environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            with (self.folder / f"agent{number}.txt").open("ab") as output:
                self._running[number] = subprocess.Popen(
                    argv, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
                )
            if number == 0:
                time.sleep(1.0)

    def kill_worker(self, number: int) -> None:
        """What the kernel does to who takes too much memory."""
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.folder / f"worker{number}").read_text()), signal.SIGKILL)

    def kill(self, *numbers: int) -> None:
        """A host goes down."""
        for number in numbers:
            agent = self._running.pop(number)
            agent.kill()
            agent.wait()
            self.kill_worker(number)

    def rows(self) -> list[Row]:
        """What was noted."""
        path = self.folder / "log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, what: str, is_so: Callable[[list[Row]], bool]) -> list[Row]:
        """Until that can be seen from what was noted.

        Raises:
            RuntimeError: it does not come.
        """
        until = time.monotonic() + PATIENCE_S
        while not is_so(rows := self.rows()):
            if time.monotonic() > until:
                texts = [path.read_text()[-2000:] for path in sorted(self.folder.glob("agent*.txt"))]
                raise RuntimeError("\n".join([f"no {what} after {PATIENCE_S:g} s", *texts]))
            time.sleep(0.1)
        return rows

    def close(self) -> None:
        """End all."""
        self.kill(*list(self._running))


def lives(rows: list[Row]) -> list[list[Row]]:
    """Rows by restart, in order."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["life"], []).append(row)
    return list(found.values())


def steps(life: list[Row]) -> dict[int, str]:
    """Digests by step."""
    return {row["step"]: row["digest"] for row in life if "step" in row}


def trained(size: int, restart: int) -> Callable[[list[Row]], bool]:
    """Whether a job of so many ranks has saved, and trained on, after so many restarts."""

    def is_so(rows: list[Row]) -> bool:
        found = lives(rows)
        if len(found) <= restart or found[-1][0]["size"] != size:
            return False
        done = steps(found[-1])
        return any(step % EVERY == 0 and step + 2 in done for step in done)

    return is_so


def elastic(agents: Agents) -> list[Row]:
    """Rows: each restart, and what it kept."""
    agents.start(0, 1, 2, 3)
    rows = agents.wait("four ranks", trained(4, 0))
    actions: tuple[tuple[str, int, Callable[[], None]], ...] = (
        ("a worker is killed", 4, lambda: agents.kill_worker(1)),
        ("two hosts go", 2, lambda: agents.kill(2, 3)),
        ("one comes", 3, lambda: agents.start(2)),
        ("one more comes", 4, lambda: agents.start(3)),
    )
    found = []
    for what, size, act in actions:
        before, begin = lives(rows), time.monotonic()
        act()
        rows = agents.wait(what, trained(size, len(before)))
        took_s, (earlier, life) = time.monotonic() - begin, lives(rows)[-2:]
        row = {"what": what, "ranks": size, "from": life[0]["from"], "moved": life[0]["moved"], "took_s": took_s}
        if earlier[0]["size"] == size:
            both = steps(earlier).keys() & steps(life).keys()
            row["same bits"] = bool(both) and all(steps(earlier)[step] == steps(life)[step] for step in both)
        row["right"] = row["moved"] <= LAW and row.get("same bits", True)
        found.append(row)
        bits = f", {'the same' if row['same bits'] else 'OTHER'} bits" if "same bits" in row else ""
        say(f"{what}: {size} ranks went on from step {row['from']}, what is owed moved by {row['moved']:.1e}{bits}")
    return found


def main() -> None:
    """The command."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--width", type=int, default=256, help="of the model: width² parameters")
    arguments.add_argument("--save", action="store_true", help="write benchmarks/results/elastic.json")
    arguments.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.worker is not None:
        work(chosen.worker, chosen.width)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # agents end with who started them
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        agents = Agents(Path(folder), chosen.width)
        try:
            rows = elastic(agents)
        finally:
            agents.close()
    if chosen.save:
        write(RESULTS_DIR / "elastic.json", record({"every": EVERY, "width": chosen.width}, 0, rows))
    raise SystemExit(0 if all(row["right"] for row in rows) else 1)


if __name__ == "__main__":
    main()
