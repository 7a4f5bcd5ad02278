"""The ways to exchange gradients that a benchmark compares: a name, and what it registers on a DDP model.

| arm                          | meaning                                                             |
| ---------------------------- | ------------------------------------------------------------------- |
| ``none``                     | communicates nothing: the compute-only bound (replicas drift apart) |
| ``barrier``                  | as ``none``, and ranks meet once a step: they wait for one another  |
| ``plain``                    | DDP as it is                                                        |
| ``fp16``                     | PyTorch's own hook (its bf16 twin refuses to run without CUDA)      |
| ``powersgd:rank=1``          | PyTorch's own hook, from its second step on                         |
| ``espresso:SPEC``            | ``strategy="auto"`` with that compressor, or with ``auto``          |
| ``espresso:SPEC@PATH``       | a given strategy file                                               |
| ``espresso:SPEC~8``          | automatic, with an error budget of eight gradients                  |
| ``bare:SPEC``                | as many bytes as ``espresso:SPEC`` sends beside it, or else as that |
|                              | compressor makes of all tensors, in one all-gather after the last   |
|                              | bucket: what one message costs (replicas drift apart)               |
| ``servers:raw``              | uncompressed, through parameter servers (``espresso.launch``)       |
| ``servers:SPEC``             | two-way through parameter servers, every tensor                     |
"""

# No `from __future__ import annotations` here: DDP refuses hooks whose annotations are strings.
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

KINDS = ("none", "barrier", "plain", "fp16", "powersgd", "bare", "espresso", "servers")


class Decider(Protocol):
    """What this file needs of an ``EspressoState``."""

    @property
    def decided(self) -> bool:
        """Whether automatic mode has ended; true at once for a given strategy."""

    @property
    def verdict(self) -> str:
        """What automatic mode decided and why."""

    def metrics(self) -> dict[str, float]:
        """Flat figures, such as ``espresso/bytes_sent``."""

    def close(self) -> None:
        """Stop threads and free process groups."""


@dataclass(frozen=True)
class Arm:
    """One arm. ``detail`` is what follows the first colon of its name."""

    name: str
    kind: str
    detail: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"arm {self.name!r}: no kind {self.kind!r}; there are {', '.join(KINDS)}")
        if self.kind in ("bare", "espresso", "servers") and not self.detail:
            raise ValueError(f"arm {self.name!r} names no compressor: write {self.kind}:efsignsgd, for example")
        budget = self.detail.partition("@")[0].partition("~")[2]
        if self.kind == "espresso" and budget and not budget.replace(".", "", 1).isdigit():
            raise ValueError(f"arm {self.name!r}: write espresso:auto~8, for an error budget of eight gradients")
        if self.kind == "powersgd" and not self.detail.removeprefix("rank=").isdigit():
            raise ValueError(f"arm {self.name!r}: write powersgd:rank=1, for example")

    @property
    def keeps_replicas_equal(self) -> bool:
        """Whether the arm averages gradients at all."""
        return self.kind not in ("none", "barrier", "bare")

    def meet(self) -> None:
        """At the end of a step: where the arm says so, ranks wait for one another."""
        if self.kind == "barrier":
            dist.barrier()

    def attach(
        self,
        model: DistributedDataParallel,
        artifacts_dir: Path | None = None,
        decide_by: int | None = None,
        *,
        adapt: bool = False,
    ) -> Decider | None:
        """Register the arm on ``model``; returns Espresso's state for its own arms.

        Args:
            model: no hook is registered on it yet.
            artifacts_dir: where an automatic arm leaves its strategy and its job.
            decide_by: of an automatic arm; None leaves the setting's default. 0 takes as few steps as may be, for
                where a plain one takes seconds; 1 decides as soon, and measures as much as by default.
            adapt: whether an automatic arm keeps deciding. To one that takes turns the others' blocks are a change.
        """
        if self.kind in ("none", "barrier"):
            model.register_comm_hook(None, communicate_nothing)
        elif self.kind == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif self.kind == "powersgd":
            rank = int(self.detail.removeprefix("rank="))
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self.kind == "bare":
            OneMessage.of(model, self.detail).attach(model)
        elif self.kind == "espresso":
            return self._register(model, artifacts_dir, decide_by, adapt)
        elif self.kind == "servers":
            return self._register_servers(model)
        return None

    def _register_servers(self, model: DistributedDataParallel) -> Decider:
        import espresso
        from benchmarks.exchange import uniform
        from espresso.optim.exchange import TwoWay
        from espresso.strategies import CompressorSpec

        raw = self.detail == "raw"
        spec = CompressorSpec.parse("none" if raw else self.detail)
        policy = uniform("flat.push > sum@server > flat.pull") if raw else TwoWay(spec, raw_below_bytes=0)
        state: Decider = espresso.register(model, compressor=spec, strategy=policy)
        return state

    def _register(
        self, model: DistributedDataParallel, artifacts_dir: Path | None, decide_by: int | None, adapt: bool
    ) -> Decider:
        import espresso

        spec, _, path = self.detail.partition("@")
        compressor, _, budget = spec.partition("~")
        config: dict[str, Any] = {"adapt": adapt}
        if budget:
            config |= {"error_budget": float(budget)}
        if not path and artifacts_dir is not None:
            config |= {"artifacts_dir": str(artifacts_dir)}
        if not path and decide_by is not None:
            config |= {"decide_by": decide_by}
        if not path and decide_by == 0:
            config |= {"profile_steps": 4, "race_steps": 3}
        config["compile_beside"] = False  # what is compiled when is not what a benchmark of steps compares
        state: Decider = espresso.register(model, compressor=compressor, strategy=path or "auto", **config)
        return state


def communicate_nothing(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """A hook that leaves every rank its own gradient."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@dataclass
class OneMessage:
    """A hook's state: a message of a fixed size, gathered from all ranks after the last bucket.

    Attributes:
        mine, theirs: uint8, ``num_bytes`` of them, and as many for each rank.
        waiting: buckets that come with the message, with their futures.
    """

    mine: torch.Tensor
    theirs: torch.Tensor
    waiting: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]]

    @classmethod
    def of(cls, model: DistributedDataParallel, spec: str) -> "OneMessage":
        """A message as large as the compressor's payload of all parameters."""
        from espresso.compressors import Segment, create

        segments = [
            Segment(name, 0, p.numel(), tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad
        ]
        num_bytes = create(spec).layout(segments).num_bytes
        mine = torch.randint(256, (num_bytes,), dtype=torch.uint8)
        return cls(mine, torch.empty(dist.get_world_size() * num_bytes, dtype=torch.uint8), [])

    def attach(self, model: DistributedDataParallel) -> None:
        """Register the hook."""
        model.register_comm_hook(self, OneMessage.hook)

    def resize(self, sent_bytes: int) -> None:
        """Send so many bytes a step and rank from now on. All ranks alike, between two steps."""
        ranks = dist.get_world_size()
        num_bytes = max(sent_bytes // max(ranks - 1, 1), 1)
        self.mine = torch.randint(256, (num_bytes,), dtype=torch.uint8)
        self.theirs = torch.empty(ranks * num_bytes, dtype=torch.uint8)

    def hook(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Every rank keeps its own gradient, and has it when the message has come."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.waiting.append((bucket.buffer(), future))
        if bucket.is_last():
            waiting, self.waiting = self.waiting, []

            def arrived(_: object) -> None:
                for buffer, done in waiting:
                    done.set_result(buffer)

            dist.all_gather_into_tensor(self.theirs, self.mine, async_op=True).get_future().then(arrived)
        return future


def parse_arms(text: str) -> tuple[Arm, ...]:
    """Arms separated by commas; a piece such as ``ratio=0.01`` belongs to the arm before it.

    Raises:
        ValueError: an arm of no known kind, or the same arm twice.
    """
    names: list[str] = []
    for piece in text.split(","):
        if names and "=" in piece.partition(":")[0]:
            names[-1] += f",{piece}"
        else:
            names.append(piece)
    if len(set(names)) != len(names):
        raise ValueError(f"an arm is named twice in {text!r}")
    parts = [(name, *name.partition(":")[::2]) for name in names]
    return tuple(Arm(name, kind, detail) for name, kind, detail in parts)
