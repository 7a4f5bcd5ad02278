"""Small DDP models and steps for the workers of ``run_ranks``, and scenarios that share a process start."""

from __future__ import annotations

import gc
import importlib
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import espresso
from benchmarks import exchange
from espresso.live import beside, codec_costs, profiler
from espresso.live.checkpoint import Checkpoint
from espresso.live.names import named_gradients, tensor_specs
from espresso.live.parts import RESIDUAL
from espresso.live.state import EspressoState
from espresso.strategies import PLAIN, Choice, Cluster, CompressorSpec, Strategy, parse_option
from tests.workers import Outcome, run_ranks

TINY_BUCKETS_MB = 0.002
"""About 500 fp32 numbers a bucket, so that every model here has many."""

ALLREDUCE = "flat.allreduce"
ALLGATHER = "comp > flat.allgather > dec"
SHARDED = "comp > flat.all_to_all > dec > comp > flat.allgather > dec"
HIERARCHICAL = "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec > intra.allgather"
ROOTED = "intra.reduce > comp > inter.allgather > dec > intra.broadcast"


class Halves(nn.Module):
    """Gradients that are small integers, of the second half only where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.now_and_then = (nn.Parameter(torch.zeros(3000)) for _ in range(2))

    def forward(self, key: int, both: bool) -> torch.Tensor:
        draw = torch.Generator().manual_seed(key)
        first, second = torch.randint(-8, 9, (2, 3000), generator=draw).float()
        return self.always @ first + (self.now_and_then @ second if both else 0)


class IntegerNet(nn.Module):
    """Gradients that are the given small integers exactly, whatever the parameters are.

    ``forward(key)`` is the dot product of all parameters with numbers drawn from ``key``.
    """

    def __init__(self, sizes: Sequence[int] = (300, 7, 1100, 64, 1, 513, 900)) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in sizes])

    def forward(self, key: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(key)
        terms = [(p * torch.randint(-8, 9, p.shape, generator=draw).to(p)).sum() for p in self.weights]
        return torch.stack(terms).sum()


def mlp(*widths: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Linear layers with tanh between them, the same on every rank."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after, dtype=dtype), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def batch(rank: int, step: int, width: int, rows: int = 4) -> torch.Tensor:
    """This rank's input of this step."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 * step + rank))


OPENED: list[Any] = []
"""Groups to be destroyed after a scenario: a Gloo group has threads, which wake a hundred times a second."""


def wrap(module: nn.Module, **settings: Any) -> DistributedDataParallel:
    """DDP with many buckets, in a process group of its own unless one is given."""
    settings.setdefault("bucket_cap_mb", TINY_BUCKETS_MB)
    group = settings.pop("process_group", None)
    if group is None and "device_mesh" not in settings:
        group = dist.new_group()
        OPENED.append(group)
    return DistributedDataParallel(module, process_group=group, **settings)


def strategy_for(
    module: nn.Module,
    cluster: Cluster,
    option: str = ALLREDUCE,
    compressor: str = "none",
    partition_bytes: int = 0,
) -> Strategy:
    """One choice for all tensors."""
    parsed = parse_option(option)
    choice = Choice(parsed, CompressorSpec.parse(compressor)) if parsed.is_compressed else PLAIN
    tensors = tensor_specs(named_gradients(module))
    return Strategy.uniform(tensors, cluster, choice, partition_bytes=partition_bytes)


@contextmanager
def registered(
    ddp: DistributedDataParallel,
    option: str = ALLREDUCE,
    compressor: str = "none",
    *,
    ranks_per_node: int = 1,
    partition_bytes: int = 0,
    timeout_s: float = 15.0,
    **settings: Any,
) -> Iterator[EspressoState]:
    """``espresso.register`` with a uniform strategy; closed at the end."""
    size = dist.get_world_size(ddp.process_group)
    cluster = Cluster(size // ranks_per_node, ranks_per_node)
    settings.setdefault("compile_beside", False)  # decided after so many steps, whatever is on disk
    settings.setdefault("strategy", strategy_for(ddp, cluster, option, compressor, partition_bytes))
    state = espresso.register(
        ddp, compressor, ranks_per_node=ranks_per_node, timeout_s=timeout_s, offload_threads=1, **settings
    )
    try:
        yield state
    finally:
        state.close()


def digest(module: nn.Module) -> str:
    """A hash of all parameters, bit for bit."""
    return exchange.digest(module.parameters())


def same(left: nn.Module, right: nn.Module) -> bool:
    """Equal bit for bit."""
    return digest(left) == digest(right)


def agreed(ddp: DistributedDataParallel) -> bool:
    """Whether all ranks of the model's group hold the same parameters, bit for bit. Collective."""
    everybody: list[Any] = [None] * dist.get_world_size(ddp.process_group)
    dist.all_gather_object(everybody, digest(ddp.module), group=ddp.process_group)
    return len(set(everybody)) == 1


def train(
    ddp: DistributedDataParallel,
    steps: range,
    loss: Callable[[int], torch.Tensor],
    rate: float = 0.125,
) -> list[str]:
    """SGD steps on ``loss(step)``; the digest after every step, which must be equal on all ranks."""
    digests = []
    for step in steps:
        ddp.zero_grad()
        loss(step).backward()
        sgd(ddp, rate)
        assert agreed(ddp), f"replicas differ after step {step}"
        digests.append(digest(ddp.module))
    return digests


def sgd(module: nn.Module, rate: float = 0.125) -> None:
    """One plain step, for the parameters that have a gradient."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad


def kept_on_all_ranks(state: EspressoState, ddp: nn.Module, held: str = RESIDUAL) -> dict[str, torch.Tensor]:
    """Residuals (or velocities) and carry, summed over the ranks that answer for them."""
    kept = {name: torch.zeros(p.numel(), dtype=torch.float64) for name, p in named_gradients(ddp).items()}
    for row in Checkpoint.parse(state.gather_state_dict()).rows():
        if row.held == held:
            kept[row.tensor][row.start : row.start + row.values.size] += torch.from_numpy(row.values)
    return kept


# -- scenarios -------------------------------------------------------------------------------------


def measure_briefly() -> None:
    """Automatic mode measures less often in this process: what it finds is not the subject."""
    profiler.LOOP_US, profiler.MAX_LOOP, profiler.REPEATS = 2_000.0, 4, 1
    profiler.BESIDE_US, profiler.BURST_TRIES = 10_000.0, 1
    beside._FREE_S, beside._TIMES = 0.005, 1
    codec_costs.REPEATS = 2


def play(rank: int, module: str, names: Sequence[str], is_brief: bool) -> dict[str, tuple[Any, str]]:
    """Run the named functions ``scenario(rank)`` of a test module; ``(value, traceback)`` of each."""
    found = importlib.import_module(module)
    if is_brief:
        measure_briefly()
    results = {}
    for name in names:
        try:
            results[name] = (getattr(found, name)(rank), "")
        except Exception:
            results[name] = (None, traceback.format_exc())
        dist.barrier()
        gc.collect()
        while OPENED:
            with suppress(ValueError):  # the scenario did
                dist.destroy_process_group(OPENED.pop())
    return results


class Said(logging.Handler):
    """While entered, keeps what is warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def __enter__(self) -> Said:
        logging.getLogger("espresso").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("espresso").removeHandler(self)


class Played:
    """What the scenarios of one process start gave: ``played(scenario)`` is a list of values by rank.

    Args:
        is_brief: whether automatic mode measures no more than it must.
    """

    def __init__(
        self,
        module: str,
        scenarios: Sequence[Callable[[int], Any]],
        num_ranks: int,
        *,
        deadline_s: float = 330.0,
        environment: dict[str, str] | None = None,
        is_brief: bool = True,
        **settings: Any,
    ) -> None:
        names = [scenario.__name__ for scenario in scenarios]
        self._outcomes: list[Outcome] = run_ranks(
            play,
            num_ranks,
            module,
            names,
            is_brief,
            deadline_s=deadline_s,
            environment=dict(environment or {}),
            **settings,
        )

    def __call__(self, scenario: Callable[[int], Any]) -> list[Any]:
        results = [outcome.value[scenario.__name__] for outcome in self._outcomes]
        errors = [f"rank {rank}:\n{error}" for rank, (_, error) in enumerate(results) if error]
        assert not errors, "\n".join(errors)
        return [value for value, _ in results]
