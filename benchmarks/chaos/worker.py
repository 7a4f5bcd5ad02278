"""The training script that faults are played on. It tells its phases, its error or its result, a JSON line each.

Run by torchrun or mpirun (through the launcher of parameter servers, where the job has some), or forked by ``trial``.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

WIDTHS = (64, 256, 256, 10)
STEP_S = 0.01
"""A step's pause: faults of a second find the job training."""

PROFILE_FROM, SEARCH_AT = 4, 11
"""Steps of automatic mode with its own settings: the first that is measured, and the one that ends with the search."""

OTHER_OPTION = "comp > flat.allgather > dec"
"""What jobs with a given strategy switch to; they go back when they save a checkpoint."""

FATAL = "the script of this rank fails on purpose"


@dataclass(frozen=True)
class Work:
    """What all ranks of a job do.

    Attributes:
        folder: where each rank leaves ``rank<N>.jsonl``, and a controller the file ``fault`` for faults from within.
        option: of all matrices; empty is automatic mode.
        ranks_per_node: as ``espresso.register`` takes it; None finds out.
        artifacts_dir: where artefacts go, or None.
        wrong_build: the rank that claims to be another version, or -1.
    """

    folder: str
    option: str
    compressor: str
    ranks_per_node: int | None
    timeout_s: float
    num_steps: int
    artifacts_dir: str | None = None
    wrong_build: int = -1

    @classmethod
    def from_json(cls, text: str) -> "Work":
        """What :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def teller(path: Path) -> Callable[..., None]:
    """A function that appends a line to a file, whole and at once."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def tell(**words: Any) -> None:
        os.write(descriptor, (json.dumps({"at": time.time(), "pid": os.getpid(), **words}) + "\n").encode())

    return tell


def run(work: Work) -> None:
    """Train as one rank; the launcher's variables say which."""
    rank = int(os.environ["RANK"])
    tell = teller(Path(work.folder) / f"rank{rank}.jsonl")
    tell(phase="import")
    import logging

    import torch
    import torch.distributed as dist

    import espresso

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s rank {rank}: %(message)s")
    torch.set_num_threads(1)
    if rank == work.wrong_build:
        espresso.__version__ = "0.0.0+other"
    dist.init_process_group("gloo", timeout=timedelta(seconds=work.timeout_s))
    states: list[Any] = []
    try:
        tell(result=_train(work, rank, tell, states))
    except Exception as error:  # told, whatever it is
        kept = [str(state.error) for state in states if state.error is not None]
        tell(error=f"{type(error).__name__}: {error}", kept=kept)
        raise SystemExit(1) from None


def _train(work: Work, rank: int, tell: Callable[..., None], states: list[Any]) -> str:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import espresso
    from benchmarks.exchange import digest, uniform
    from espresso.live.names import named_gradients, tensor_specs

    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    ddp = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.2)
    dist.barrier()  # what happens before is torch's
    tell(phase="start-up")
    _obey(work, rank, tell, ddp)
    state = espresso.register(
        ddp,
        work.compressor,
        uniform(work.option, work.compressor) if work.option else "auto",
        ranks_per_node=work.ranks_per_node,
        timeout_s=work.timeout_s,
        artifacts_dir=work.artifacts_dir,
        offload_threads=1,
        decide_by=30,
    )
    states.append(state)
    tensors = tensor_specs(named_gradients(ddp))

    def use(option: str) -> None:
        assert state.cluster is not None
        state.use(uniform(option, work.compressor)(tensors, state.cluster))

    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    told: set[str] = set()
    for step in range(work.num_steps):
        phase = "warm-up" if step == 0 else _phase(work, step, state.decided)
        if phase not in told:
            tell(phase=phase)
            told.add(phase)
        _obey(work, rank, tell, ddp)
        if phase == "switch":
            use(OTHER_OPTION)
        if phase == "save":
            torch.save(state.gather_state_dict(), Path(work.folder) / f"checkpoint{rank}")
            if work.option:
                use(work.option)
        with state.errors():
            optimizer.zero_grad()
            ddp(torch.randn(8, WIDTHS[0], generator=generator)).square().mean().backward()
            optimizer.step()
        time.sleep(STEP_S)
    result = digest(ddp.parameters())
    tell(phase="closing")
    _obey(work, rank, tell, ddp)
    state.close()
    dist.destroy_process_group()
    return result


def _phase(work: Work, step: int, decided: bool) -> str:
    """Where the job is before a step."""
    if step == work.num_steps // 3 and work.option:
        return "switch"
    if step == 2 * work.num_steps // 3:
        return "save"
    if work.option or decided:
        return "steady" if step >= 5 else "warm-up"
    if step < SEARCH_AT:
        return "warm-up" if step < PROFILE_FROM else "profile"
    return "search" if step == SEARCH_AT else "race"


def _obey(work: Work, rank: int, tell: Callable[..., None], ddp: Any) -> None:
    """Do what a fault from within asks of this rank."""
    asked = Path(work.folder) / f"fault{rank}"
    if not asked.exists():
        return
    what = asked.read_text()
    asked.unlink()
    tell(fault=what)
    if what == "raise in backward":
        next(ddp.parameters()).register_hook(_fail)
    if what == "raise":
        _fail()
    if what == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))
        bytearray(64 << 20)


def _fail(*_: Any) -> None:
    raise RuntimeError(FATAL)


if __name__ == "__main__":
    from espresso.comm.environment import export_environment

    export_environment()
    run(Work.from_json(sys.argv[1]))
