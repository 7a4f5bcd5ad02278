"""Checkpoints through torch.distributed.checkpoint: kills in the middle of saves, what saving costs.

    python -m benchmarks.lasting kills --count 100   # a job is killed while it saves; its latest whole checkpoint loads
    python -m benchmarks.lasting saves               # time and memory of save and async_save, beside what is kept

Two ranks on this machine.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.nn.parallel import DistributedDataParallel

import espresso
from benchmarks.exchange import uniform
from benchmarks.ports import free_port
from benchmarks.rank_pool import RANKS
from benchmarks.results import RESULTS_DIR, record, write

NUM_RANKS = 2
PATIENCE_S = 120.0
MOST_STALL, MOST_BESIDE = 0.05, 1.2
"""The bars of saves: the part of a save for which training stands still, and memory over what is kept."""

SIGNS = uniform("comp > flat.allgather > dec", "efsignsgd", partition_bytes=0)
"""Everything by signs, with residuals."""


class Job:
    """A model, trained a step at a time."""

    def __init__(self, rank: int, width: int) -> None:
        torch.manual_seed(0)
        self.rank, self.width = rank, width
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 8)))
        self.state = espresso.register(self.model, strategy=SIGNS, ranks_per_node=1, timeout_s=60, offload_threads=1)
        self.step = 0

    def train(self) -> None:
        """One step."""
        generator = torch.Generator().manual_seed(1000 * self.step + self.rank)
        self.model.zero_grad()
        self.model(torch.randn(4, self.width, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.1 * parameter.grad)
        self.step += 1

    def parts(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint."""
        return {"model": self.model.module.state_dict(), "espresso": self.state}


def _rank(rank: int, port: int, target: Any, args: tuple[Any, ...], answers: Any) -> None:
    ours = {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= ours | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    answers.put((rank, target(rank, *args)))
    answers.close()
    answers.join_thread()
    dist.destroy_process_group()


def start(target: Any, *args: Any) -> tuple[list[Any], Any]:
    """Ranks that run ``target(rank, *args)``, and the queue of their answers."""
    port, answers = free_port(), RANKS.Queue()
    ranks = [RANKS.Process(target=_rank, args=(rank, port, target, args, answers)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    return ranks, answers


def finish(ranks: list[Any], answers: Any) -> dict[int, Any]:
    """What every rank answered."""
    found = dict(answers.get(timeout=PATIENCE_S) for _ in ranks)
    for process in ranks:
        process.join(timeout=PATIENCE_S)
    return found


# -- kills -----------------------------------------------------------------------------------------


def saving(rank: int, folder: str, width: int) -> None:
    """Train and save until the end comes."""
    job = Job(rank, width)
    while True:
        job.train()
        save(job.parts(), checkpoint_id=f"{folder}/{job.step}")


def latest(folder: Path) -> Path | None:
    """The latest checkpoint that is whole: ``.metadata`` is written last."""
    whole = [path.parent for path in folder.glob("*/.metadata")]
    return max(whole, key=lambda path: int(path.name), default=None)


def loading(rank: int, folder: str, width: int) -> tuple[int, float]:
    """Load the latest; the step it is of, and the norm of what is owed. Then a step, and replicas are compared."""
    job, path = Job(rank, width), latest(Path(folder))
    assert path is not None
    load(job.parts(), checkpoint_id=path)
    job.step = int(path.name)
    found = job.state.state_dict()["step"]
    job.train()
    job.state.check_replicas()
    return found, job.state.metrics()["espresso/residual_norm"]


def kills(count: int, seed: int, width: int) -> list[dict[str, Any]]:
    """Rows: the step of the last save that was begun, that of the checkpoint which was loaded."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        folder = Path(tempfile.mkdtemp(prefix="espresso-kills-"))
        ranks, _ = start(saving, str(folder), width)
        while latest(folder) is None and all(process.is_alive() for process in ranks):
            time.sleep(0.01)
        begun = len(list(folder.iterdir()))
        while len(list(folder.iterdir())) == begun:  # the next save begins
            time.sleep(0.001)
        time.sleep(draw.random() * 0.1)
        for process in ranks:
            os.kill(process.pid, signal.SIGKILL)
        for process in ranks:
            process.join()
        last = max(int(path.name) for path in folder.iterdir())
        path = latest(folder)
        answers = finish(*start(loading, str(folder), width))
        step = int(path.name) if path is not None else 0
        right = all(found == step and norm > 0 for found, norm in answers.values())
        rows.append({"number": number, "begun": last, "loaded": step, "in the middle": last > step, "right": right})
        shutil.rmtree(folder)
        say(f"{number + 1}: killed in save {last}, went on from {step}, {'right' if right else 'WRONG'}")
    return rows


# -- what saving costs -----------------------------------------------------------------------------


def costs(rank: int, folder: str, width: int) -> dict[str, float]:
    """Seconds, and bytes beyond what was taken before; of espresso's part alone."""
    job, apart = Job(rank, width), dist.new_group()
    for _ in range(4):
        job.train()
    row = {"residual_bytes": job.state.metrics()["espresso/residual_bytes"]}
    row["kept_bytes"] = float(sum(stretch.numel * 4 for stretch in job.state.session.store.lend()))
    before = _forget_peak()
    for _ in range(3):
        job.train()
    training = _peak() - before
    for how in ("save", "async_save"):
        for turn in range(2):  # the first loads what PyTorch needs
            dist.barrier()
            before, begin = _forget_peak() + (training if how == "async_save" else 0), time.perf_counter()
            where = f"{folder}/{how}{turn}"
            if how == "save":
                save({"espresso": job.state}, checkpoint_id=where)
            else:
                under_way = async_save({"espresso": job.state}, checkpoint_id=where, process_group=apart)
            row[f"{how}_s"] = time.perf_counter() - begin
            if how == "async_save":
                for _ in range(3):
                    job.train()
                under_way.result()  # type: ignore[union-attr]
            row[f"{how}_extra_bytes"] = float(_peak() - before)
    return row


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def _forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def say(text: str) -> None:
    """A line for whoever waits."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """The command."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=("kills", "saves"))
    arguments.add_argument("--count", type=int, default=100, help="kills")
    arguments.add_argument("--width", type=int, help="of the model: width² parameters (512, saves 3000)")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--save", action="store_true", help="write benchmarks/results/lasting_….json")
    chosen = arguments.parse_args()
    if chosen.what == "kills":
        rows = kills(chosen.count, chosen.seed, chosen.width or 512)
        middle, right = sum(row["in the middle"] for row in rows), sum(row["right"] for row in rows)
        say(f"{len(rows)} kills, {middle} of them in the middle of a save: {right} loadable checkpoints")
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = [costs_of for _, costs_of in sorted(finish(*start(costs, folder, chosen.width or 3000)).items())]
        for row in rows:
            say(", ".join(f"{name} {value:.4g}" for name, value in row.items()))
        for rank, row in enumerate(rows):
            stall = row["async_save_s"] / row["save_s"]
            say(f"rank {rank}: async_save stalls training by {stall:.1%} of a save")
            beside = {how: row[f"{how}_extra_bytes"] / row["kept_bytes"] for how in ("save", "async_save")}
            for how, times in beside.items():
                say(f"rank {rank}, {how}: {times:.2f} times what is kept, beside it")
            row["right"] = stall <= MOST_STALL and max(beside.values()) <= MOST_BESIDE
    if chosen.save:
        config = {"what": chosen.what, "count": chosen.count, "width": chosen.width}
        write(RESULTS_DIR / f"lasting_{chosen.what}.json", record(config, chosen.seed, rows))
    raise SystemExit(0 if all(row.get("right", True) for row in rows) else 1)


if __name__ == "__main__":
    main()
