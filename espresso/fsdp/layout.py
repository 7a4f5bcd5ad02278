"""``hybrid_shard``: lays a mesh of replicas and shards over the ranks, shards a model over it, and registers it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from espresso.comm.environment import check_settings, read_environment
from espresso.comm.errors import TopologyError
from espresso.comm.groups import backend_for
from espresso.comm.member import gathered
from espresso.fsdp.private import check_version
from espresso.fsdp.registration import register
from espresso.live.config import Range, Settings
from espresso.live.given import AUTO, CompressorLike, StrategyLike
from espresso.live.names import named_gradients
from espresso.live.script import Scaler
from espresso.live.state import EspressoState

_SHARDS = Range("a whole number or None", (int, type(None)))
_POLICY = Range("a MixedPrecisionPolicy or None", (MixedPrecisionPolicy, type(None)))


def hybrid_mesh(device_type: str, shards: int | None = None) -> DeviceMesh:
    """A mesh with the dimensions ``"replicate"`` and ``"shard"`` over all ranks.

    All ranks together.

    Args:
        shards: ranks that share one copy of the model; None takes the ranks of a host, as the launcher says.

    Raises:
        TypeError: no whole number.
        TopologyError: it does not divide the number of ranks, or no launcher says how many a host has, or there is no
            process group yet.
        DisagreementError: it is not the same on all ranks, as on hosts with unlike numbers of ranks.
    """
    _SHARDS.check("shards", shards)
    if not dist.is_initialized():
        raise TopologyError("torch.distributed is not initialised; call init_process_group before espresso")
    world_size = dist.get_world_size()
    size = _ranks_of_this_host(world_size) if shards is None else shards
    # Before the mesh: ranks that lay out unlike ones wait for each other in groups that the others do not make.
    everybody = gathered(torch.tensor([size], device=device_type), world_size, None)
    what = "shards= (by default the ranks of a host)"
    check_settings({rank: {what: int(theirs)} for rank, theirs in enumerate(everybody)})
    if shards is None and not size:
        raise TopologyError(
            "no launcher says how many ranks this host has: give shards=, the number of ranks that share one copy of"
            " the model"
        )
    if size < 1 or world_size % size:
        raise TopologyError(
            f"shards={size} does not divide the {world_size} ranks of this job: every copy of the model needs as many"
        )
    return init_device_mesh(device_type, (world_size // size, size), mesh_dim_names=("replicate", "shard"))


def _ranks_of_this_host(world_size: int) -> int:
    """As the launcher says; 0 where none does."""
    if world_size == 1:
        return 1
    launch = read_environment()
    return 0 if launch is None else launch.local_world_size


def hybrid_shard(
    model: torch.nn.Module,
    blocks: Iterable[torch.nn.Module] = (),
    *,
    shards: int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    compressor: CompressorLike = AUTO,
    strategy: StrategyLike = AUTO,
    grad_scaler: Scaler | None = None,
    **config: Unpack[Settings],
) -> EspressoState:
    """Shard a model inside every host, keep a replica of it on each, and average between them through espresso.

    All ranks together. Rank 0's parameters and buffers are sent to all others, as DDP does: only there they need their
    values. Optimizers are made afterwards: they hold the shards.

    Args:
        model: on the device where it is trained.
        blocks: modules of it that are gathered and reduced on their own, as a transformer's blocks; what is in none of
            them goes with the model itself.
        shards: ranks that share one copy of the model; None takes the ranks of a host, as the launcher says.
        mp_policy, reshard_after_forward: as for ``fully_shard``.
        compressor, strategy, grad_scaler, config: as for :class:`~espresso.live.state.EspressoState`.

    Raises:
        TypeError, ValueError: an argument is not what it should be; blocks that are no modules of the model.
        TopologyError, DisagreementError: see :func:`hybrid_mesh`.
        UnsupportedModelError: see :func:`register`.

    Example:
        >>> state = espresso.fsdp.hybrid_shard(model, blocks=model.blocks)   # doctest: +SKIP
    """
    check_version()
    blocks = _inside(model, blocks)
    _POLICY.check("mp_policy", mp_policy)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    mesh = hybrid_mesh(device.type, shards)
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    with torch.no_grad():  # before they are cut: a shard of each rank's own values would go unnoticed
        for tensor in (*model.parameters(), *model.buffers()):
            _take_over(tensor)
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh["shard"], mp_policy=policy, reshard_after_forward=reshard_after_forward)
    if backend_for(device.type, mesh["shard"].get_group()) == "gloo":
        sum_and_divide(model)
    return register(model, mesh["replicate"], compressor, strategy, grad_scaler, **config)


def _take_over(tensor: torch.Tensor) -> None:
    """Rank 0's values. Gloo knows no strides; what is expanded has its numbers in one place only."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    sent = tensor.contiguous()
    dist.broadcast(sent, src=0)
    if sent is not tensor:
        tensor.copy_(sent)


def _inside(model: torch.nn.Module, blocks: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    """The blocks, each once, what is inside another before it: FSDP takes what none has yet."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"espresso.fsdp.hybrid_shard needs a model, got {model!r:.80} ({type(model).__name__})")
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if sharded:
        what = f"module {sharded[0]!r}" if sharded[0] else "the model"
        raise ValueError(f"{what} was given fully_shard already: use espresso.fsdp.register")
    named_gradients(model)  # refuses what cannot be exchanged before anything is changed
    inside = {id(module): name.count(".") for name, module in model.named_modules() if module is not model}
    found: list[torch.nn.Module] = list(blocks) if isinstance(blocks, Iterable) else [blocks]
    for block in found:
        if id(block) not in inside:
            raise ValueError(f"blocks must be modules inside the model, as model.blocks, got {block!r:.80}")
    return sorted(dict.fromkeys(found), key=lambda block: -inside[id(block)])


def sum_and_divide(model: torch.nn.Module) -> None:
    """Have FSDP add up and divide: Gloo takes no factors (``set_gradient_divide_factor``)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
