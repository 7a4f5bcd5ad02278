"""``register``: a model that was given ``fully_shard``, and the group of its replicas, become a job."""

from __future__ import annotations

import logging
import math
import os
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from espresso.comm.errors import UnsupportedModelError
from espresso.comm.meeting import stay_away
from espresso.fsdp.front import Front
from espresso.fsdp.private import Unit, shards_in, units_of
from espresso.live.artifacts import tell_profile
from espresso.live.config import Settings
from espresso.live.given import AUTO, CompressorLike, Given, StrategyLike
from espresso.live.names import BoundModel, dtype_name, named_gradients
from espresso.live.script import Scaler
from espresso.live.shards import Shards
from espresso.live.state import EspressoState, why_off
from espresso.strategies import Cluster, Strategy, StrategyError, TensorSpec

logger = logging.getLogger("espresso")


def register(
    model: torch.nn.Module,
    replicate: DeviceMesh | dist.ProcessGroup,
    compressor: CompressorLike = AUTO,
    strategy: StrategyLike = AUTO,
    grad_scaler: Scaler | None = None,
    **config: Unpack[Settings],
) -> EspressoState:
    """Make a model that is sharded inside replicas average its gradients over the replicas through espresso.

    All ranks together, once ``fully_shard`` was called on every module and the parameters have their values: FSDP
    sums over the ``"shard"`` dimension, espresso averages over the ``"replicate"`` dimension.

    Args:
        model: modules of it were given ``fully_shard`` over the shard dimension alone.
        replicate: the ranks that hold the same shard: the replica dimension of the mesh, or its group.
        compressor, strategy, grad_scaler, config: as for :class:`~espresso.live.state.EspressoState`. A strategy is for
            whole tensors; a function that makes one is given those.

    Returns:
        The state. It averages at every ``backward()``, which returns when the gradients are averaged.

    Raises:
        TypeError: nothing in the model was given ``fully_shard``; an unknown setting.
        ValueError: the replicas' ranks hold different shards.
        UnsupportedModelError: a PyTorch that was not tried, native HSDP, ``replicate()`` and others, by name.
        DisagreementError: the replicas' parameters differ, or their settings.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))   # doctest: +SKIP
        >>> fully_shard(model, mesh=mesh["shard"])                                          # doctest: +SKIP
        >>> state = espresso.fsdp.register(model, replicate=mesh["replicate"])              # doctest: +SKIP
    """
    _refuse_wrappers(model)
    units = units_of(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass alone it holds whole parameters
    group = _group_of(replicate)
    bound = _bind(model, units)
    _check_groups(group, units[0].shards)
    names = [name for name, _ in model.named_parameters()]
    made = _of_shards(compressor, strategy, bound.wholes, names)
    state = EspressoState(compressor, made, group, grad_scaler, **config)
    if isinstance(strategy, str | os.PathLike) and strategy != AUTO:
        state.came_from(Path(strategy))
    if state.is_off:
        stay_away(units[0].shards)
        stay_away(group)
        for unit in units:
            unit.free()
            unit.hook(partial(_average, group), _Native(state, unit))
        tell_profile(why_not=f"espresso is off ({why_off()})")
        return state.bind(bound).turn_off(why_off())  # bound: a checkpoint says of which model it is
    state.bind(bound).start()
    try:
        state.check_replicas()
        for unit in units:
            unit.free()
        Front(state, units, dict(bound.names))
    except BaseException:
        state.close()
        raise
    return state


def _refuse_wrappers(model: torch.nn.Module) -> None:
    kind = type(model).__name__
    if isinstance(model, DistributedDataParallel):
        raise TypeError("this is a DistributedDataParallel model, without shards; use espresso.register")
    if kind == "FullyShardedDataParallel":
        raise TypeError(
            "this is FSDP1 (FullyShardedDataParallel), whose hybrid strategies take no hook; use fully_shard"
        )


def _group_of(replicate: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    if isinstance(replicate, DeviceMesh):
        if replicate.ndim != 1:
            raise ValueError(f'replicate must be one dimension of the mesh, as mesh["replicate"], got {replicate}')
        return replicate.get_group()
    if not isinstance(replicate, dist.ProcessGroup):
        raise TypeError(f"replicate must be a DeviceMesh or a process group, got {type(replicate).__name__}")
    return replicate


def _bind(model: torch.nn.Module, units: list[Unit]) -> BoundModel:
    """Names and shards of the parameters that FSDP reduces."""
    dtypes = {id(parameter): dtype_name(unit.reduce_dtype) for unit in units for parameter in unit.parameters}
    named: dict[str, Any] = dict(named_gradients(model))
    left = [name for name, parameter in named.items() if id(parameter) not in dtypes]
    if left:
        logger.warning("fully_shard has left these parameters alone, so nobody averages their gradients: %s", left[:5])
    sharded = {name: parameter for name, parameter in named.items() if id(parameter) in dtypes}
    groups = {tuple(dist.get_process_group_ranks(unit.shards)) for unit in units}
    if len(groups) > 1:
        raise UnsupportedModelError(
            f"the model's modules are sharded over different ranks ({', '.join(map(str, sorted(groups)))}), and one"
            " exchange averages one mesh: give fully_shard the same mesh everywhere"
        )
    wholes = tuple(TensorSpec(name, tuple(p.shape), dtypes[id(p)]) for name, p in sharded.items())
    here = {name: parameter for name, parameter in sharded.items() if parameter.to_local().numel()}
    return BoundModel(
        weakref.ref(model),
        {id(parameter): name for name, parameter in here.items()},
        tuple(TensorSpec(name, tuple(p.to_local().shape), dtypes[id(p)]) for name, p in here.items()),
        next((parameter.to_local().device for parameter in sharded.values()), torch.device("cpu")),
        Shards(units[0].shards, wholes, {name: _start(parameter, units[0].shards) for name, parameter in here.items()}),
        shards_in,
    )


def _start(parameter: Any, shards: dist.ProcessGroup) -> int:
    """The first element of this rank's shard in the whole tensor: each has as many rows, the last ones what is left."""
    rows = -(-parameter.shape[0] // shards.size())
    return int(shards.rank() * rows * math.prod(parameter.shape[1:]))


def _of_shards(
    compressor: CompressorLike, strategy: StrategyLike, wholes: tuple[TensorSpec, ...], names: Collection[str] = ()
) -> StrategyLike:
    """A strategy that was made for whole tensors, or for those of another shard, as a function of those that are here.

    A function is asked for one of the whole tensors, so that it says the same on every rank.

    Args:
        names: of all parameters of the model.

    Raises:
        StrategyError: when it is asked for, a tensor that the strategy does not know, or of another model.
    """
    given = Given.of(compressor, strategy)
    if given.strategy is None:
        return strategy

    def make(tensors: Sequence[TensorSpec], cluster: Cluster) -> Strategy:
        found = given.on(wholes, cluster).strategy
        assert isinstance(found, Strategy)
        _check_model(found, wholes, names)
        unknown = [tensor.name for tensor in tensors if tensor.name not in found.known]
        if unknown:
            raise StrategyError(f"tensor {unknown[0]!r} of the model is not in the strategy; search again for it")
        return found.over(tensors)

    return make


def _check_model(strategy: Strategy, wholes: tuple[TensorSpec, ...], names: Collection[str]) -> None:
    """Whether a strategy's tensors are the model's, or shards of them: as wide, and of no more rows.

    Args:
        names: of the model's parameters, those too that are not averaged.

    Raises:
        StrategyError: names the first that is not.
    """
    theirs = {tensor.name: tensor for tensor in wholes}
    gone = [name for name in strategy.known if name not in theirs and name not in names]
    if gone:
        raise StrategyError(f"tensor {gone[0]!r} is in the strategy but not in the model; search again for this model")
    for ours in (tensor for tensor in strategy.tensors if tensor.name in theirs):
        whole = theirs[ours.name]
        if (ours.dtype, ours.shape[1:]) != (whole.dtype, whole.shape[1:]) or ours.shape[:1] > whole.shape[:1]:
            raise StrategyError(
                f"tensor {ours.name!r} is {whole.dtype}{list(whole.shape)} in the model but"
                f" {ours.dtype}{list(ours.shape)} in the strategy; search again for this model"
            )


@dataclass(frozen=True)
class _Native:
    """What averages where espresso is off."""

    state: EspressoState
    unit: Unit

    @property
    def is_over(self) -> bool:
        return self.state.is_closed

    def leave(self) -> None:
        self.unit.hook(None)


def _average(group: dist.ProcessGroup, flat: torch.Tensor) -> None:
    """As native HSDP does, where espresso is off."""
    dist.all_reduce(flat, group=group)
    flat.div_(group.size())


def _check_groups(replicas: dist.ProcessGroup, shards: dist.ProcessGroup) -> None:
    """Whether they cross in this rank alone."""
    across, along = dist.get_process_group_ranks(replicas), dist.get_process_group_ranks(shards)
    if set(across) & set(along) != {dist.get_rank()}:
        raise ValueError(
            f"replicate has ranks {across}, and the model is sharded over ranks {along}: the two must meet in this rank"
            f" ({dist.get_rank()}) alone, as the two dimensions of a mesh do"
        )
