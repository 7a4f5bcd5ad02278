"""The exchange below an optimizer: the two-way strategy, and registering it on a DDP model."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from espresso.comm.errors import EspressoError
from espresso.live.config import Settings
from espresso.live.given import StrategyLike
from espresso.live.names import named_gradients
from espresso.live.register import register
from espresso.live.script import Scaler
from espresso.live.state import EspressoState
from espresso.search.baselines import BYTEPS_PARTITION_BYTES, BYTEPS_RAW_BELOW_BYTES
from espresso.strategies import PLAIN, Choice, Cluster, CompressorSpec, Option, Strategy, TensorSpec
from espresso.strategies.tree import two_way_option

RAW_BELOW_BYTES = BYTEPS_RAW_BELOW_BYTES
"""Smaller tensors travel uncompressed, as in BytePS-Compress."""

KEY = "residual_lr"
"""Entry of a parameter group: the rate in whose units its residuals are. It travels with the optimizer's state."""


class ExchangeSettings(Settings, total=False):
    """Further keywords of ``espresso.register``."""

    process_group: dist.ProcessGroup | None
    grad_scaler: Scaler | None


@dataclass(frozen=True)
class TwoWay:
    """The exchange of BytePS-Compress as a strategy: compressed both ways, error feedback on both sides.

    Zhong et al., Compressed Communication for Distributed Training: Adaptive Methods and System, 2021. Gradients are
    summed inside a node and compressed; a server adds them up in rank order, compresses the sum with a residual of its
    own, and sends that back. In a job without servers (``python -m espresso.launch``) every rank is the server of one
    shard. ::

        parameter servers                intra reduce-scatter, compressed push, pull, intra all-gather (on one rank a
                                         node: push and pull); the servers keep their residuals themselves
        several nodes of several ranks   intra reduce-scatter, compressed all-to-all and all-gather between nodes,
                                         intra all-gather
        else                             compressed all-to-all and all-gather over all ranks

    Attributes:
        compressor: of both directions.
        raw_below_bytes: smaller tensors travel uncompressed.
        partition_bytes: larger groups are cut and pipelined.
        halves: whether gradients are summed inside a node as fp16 numbers, which are added up as they were.

    Example:
        >>> str(TwoWay(CompressorSpec("int8")).option(Cluster(2, 1)))
        'comp > flat.all_to_all > dec > comp > flat.allgather > dec'
    """

    compressor: CompressorSpec
    raw_below_bytes: int = RAW_BELOW_BYTES
    partition_bytes: int = BYTEPS_PARTITION_BYTES
    halves: bool = False

    def __post_init__(self) -> None:
        if self.raw_below_bytes < 0:
            raise ValueError(f"raw_below_bytes must be at least 0, got {self.raw_below_bytes!r}")

    def option(self, cluster: Cluster) -> Option:
        """The leaf of the decision tree that does it on this cluster."""
        return two_way_option(cluster, halves=self.halves)

    def __call__(self, tensors: Iterable[TensorSpec], cluster: Cluster) -> Strategy:
        """The strategy for a model on a cluster; on one rank, where nothing is exchanged, the plain one."""
        tensors = tuple(tensors)
        choice = Choice(self.option(cluster), self.compressor)
        choices = {
            tensor.name: choice if cluster.num_ranks > 1 and tensor.num_bytes >= self.raw_below_bytes else PLAIN
            for tensor in tensors
        }
        return Strategy(tensors, choices, cluster, self.partition_bytes)


class WithExchange:
    """An optimizer that has an exchange. That is its model's, on all ranks together, so there are no copies."""

    exchange: EspressoState

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} has the exchange of its model, so it cannot be copied or pickled: save"
            " optimizer.state_dict() and optimizer.exchange.state_dict() instead"
        )


def attach(
    ddp_model: DistributedDataParallel,
    compressor: str | CompressorSpec,
    strategy: StrategyLike | None,
    raw_below_bytes: int,
    exchange: EspressoState | None,
    settings: ExchangeSettings,
) -> EspressoState:
    """The given exchange, or a new one registered on the model. All ranks together.

    Raises:
        TypeError: settings for an exchange that is already there.
        What :func:`espresso.register` raises.
    """
    if exchange is not None:
        if strategy is not None or settings:
            given = "strategy" if strategy is not None else sorted(settings)[0]
            raise TypeError(f"{given!r} belongs to espresso.register, which made the exchange that is given")
        return exchange.start()
    spec = CompressorSpec.parse(compressor) if isinstance(compressor, str) else compressor
    chosen = TwoWay(spec, raw_below_bytes) if strategy is None else strategy
    return register(ddp_model, spec, chosen, **settings)


def parameters_of(ddp_model: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters whose gradients DDP averages, with their names; TypeError: this is no model."""
    if not isinstance(ddp_model, torch.nn.Module):
        raise TypeError(
            "an optimizer with an exchange takes the DistributedDataParallel model first, and parameters as params=;"
            f" got {type(ddp_model).__name__}"
        )
    return list(named_gradients(ddp_model).items())


def bucket_view(buffer: Tensor, offset: int, param: Tensor) -> Tensor:
    """The parameter's place in a bucket, laid out as DDP does: in the parameter's own strides if it has no holes."""
    if _is_dense(param):
        return buffer.as_strided(param.shape, param.stride(), buffer.storage_offset() + offset)
    return buffer[offset : offset + param.numel()].view(param.shape)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def scale_residuals(exchange: EspressoState, optimizer: Optimizer) -> None:
    """From now on, multiply residuals by η_{t-1}/η_t before step t's gradients are compressed. All ranks alike.

    Error feedback in units of the parameter's change: a residual e is what a step at rate η' did not send. Sent at rate
    η it should still move the parameter by η'·e, so it is multiplied by η'/η first (Zheng, Huang, Kwok:
    Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback, NeurIPS 2019; the shipped variant of
    BytePS-Compress). For an optimizer that is linear in the gradient this makes Σ η_t sent_t + η_T e_T = Σ η_t g_t.
    CLAN goes without: LANS normalises gradients.

    Every group follows its own rate. A rate of zero leaves residuals as they are, and the next one above zero is
    compared with the last one above zero. For any optimizer whose rate is ``lr`` in its groups.

    Raises:
        UnsupportedModelError: the exchange is of an FSDP model.
        EspressoError: in a backward pass, where the model is in ``join()``.

    Example:
        >>> scale_residuals(espresso.register(ddp), torch.optim.SGD(ddp.parameters(), 0.1))   # doctest: +SKIP
    """

    def prepare(_bucket: GradBucket, _scale: float, is_first: bool) -> None:
        if is_first and exchange.is_joining:
            raise EspressoError(
                "scale_residuals: the model is in join(), but where inputs have ended no rate changes, and all ranks"
                " rescale together; give every rank as many batches"
            )
        if is_first:
            _follow(exchange, optimizer)

    exchange.before_exchange.append(prepare)
    for group in optimizer.param_groups:
        group.setdefault(KEY, 0.0)  # torch.distributed.checkpoint reads only what is there


def _follow(exchange: EspressoState, optimizer: Optimizer) -> None:
    factors: dict[str, float] = {}
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        factor = ratio(group.get(KEY, 0.0), rate)
        if rate > 0.0:
            group[KEY] = rate
        if factor != 1.0:
            names = map(exchange.name_of, group["params"])
            factors.update({name: factor for name in names if name is not None})
    if factors:
        exchange.rescale_residuals(factors)


def ratio(before: float, now: float) -> float:
    """What residuals are multiplied by: before/now; 1 where either is zero or the ratio leaves float32."""
    if before <= 0.0 or now <= 0.0:
        return 1.0
    found = before / now
    return found if math.isfinite(found) and found < 1e30 else 1.0
