"""Everything in FSDP2 and autograd that the front needs and PyTorch does not make public. Nothing else may reach there.

What is taken:

- ``module._get_fsdp_state()._fsdp_param_groups``: which parameters are reduced together, and in which order they lie in
  the flat gradient. The public setter of the hook sets it on one group only, and says nothing of the layout.
- ``group._all_reduce_hook``, ``group.all_reduce_grads``, ``group.mesh_info``, ``group.mp_policy``,
  ``group.offload_policy``; of a parameter ``sharded_param``, ``padded_sharded_param_size``, ``is_dtensor``.
- ``Variable._execution_engine.queue_callback`` and ``torch._C._current_graph_task_id``: the end of a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule

from espresso.comm.errors import UnsupportedModelError

TRIED = ("2.13", "2.14")
"""Versions of PyTorch that the tests ran with."""

Hook = Callable[[torch.Tensor], None]


class Owner(Protocol):
    """Whose hooks a model has."""

    @property
    def is_over(self) -> bool:
        """Whether they only say that it was closed, until the model is registered again."""
        ...

    def leave(self) -> None:
        """Take them off."""
        ...


@dataclass(frozen=True)
class _Owned:
    call: Hook
    owner: Owner | None

    def __call__(self, flat: torch.Tensor) -> None:
        self.call(flat)


def _owner_of(group: Any) -> Owner | None:
    return getattr(group._all_reduce_hook, "owner", None)


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that FSDP reduces together: their gradients are stretches of one flat tensor.

    Attributes:
        name: of their module in the model.
        parameters: sharded, as the optimizer knows them.
        padded: elements each takes in the flat tensor, by ``id``; its own come first.
        reduce_dtype: of the flat tensor.
        shards: the ranks that its shards are spread over.
    """

    name: str
    parameters: tuple[torch.nn.Parameter, ...]
    padded: dict[int, int]
    reduce_dtype: torch.dtype
    shards: dist.ProcessGroup
    _group: Any

    @property
    def is_held_back(self) -> bool:
        """Whether ``set_requires_all_reduce(False)`` was said: reduce over shards, wait with the replicas."""
        return not self._group.all_reduce_grads

    def hook(self, call: Hook | None, owner: Owner | None = None) -> None:
        """Have FSDP call this with the flat gradient, once it is summed over shards (None: nothing more)."""
        self._group._all_reduce_hook = None if call is None else _Owned(call, owner)

    def free(self) -> None:
        """Take off what a closed state has left."""
        owner = _owner_of(self._group)
        if owner is not None:
            owner.leave()


def units_of(model: torch.nn.Module) -> list[Unit]:
    """What FSDP reduces together in a model, in the order of its modules.

    Raises:
        TypeError: nothing in it was given ``fully_shard``.
        UnsupportedModelError: this PyTorch, or something in the model, by name.
    """
    check_version()
    groups = _groups_in(model)
    if any(each.__module__ == "torch.distributed._composable.replicate" for each in type(model).__mro__):
        raise UnsupportedModelError(
            "this module was given replicate(), the one on DDP, which PyTorch keeps no more: use"
            " DistributedDataParallel and espresso.register, or espresso.fsdp.hybrid_shard(model, shards=1)"
        )
    if not groups:
        raise TypeError(
            f"espresso.fsdp.register needs modules that were given fully_shard, and this {type(model).__name__} has"
            " none: call torch.distributed.fsdp.fully_shard on it first, or espresso.fsdp.hybrid_shard instead"
        )
    return [_unit(name, group) for name, group in groups]


def shards_in(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The sharded parameters of a model, also while its modules hold whole ones instead."""
    return [each.sharded_param for _, group in _groups_in(model) for each in group.fsdp_params]


def check_version() -> None:
    """Refuse a PyTorch with whose insides nobody has tried this.

    Raises:
        UnsupportedModelError: it says which versions there are.
    """
    version = torch.__version__
    if not any(version.startswith(f"{tried}.") for tried in TRIED):
        raise UnsupportedModelError(
            f"espresso.fsdp uses private parts of FSDP2, which were tried with torch {', '.join(TRIED)}, and this is"
            f" torch {version}; install one of those"
        )


def _groups_in(model: torch.nn.Module) -> list[tuple[str, Any]]:
    """Each with the name of the first module that it is of."""
    found: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                found.setdefault(id(group), (name, group))
    return list(found.values())


def _unit(name: str, group: Any) -> Unit:
    where = f"module {name!r}" if name else "the model"
    _check(where, group)
    parameters = tuple(each.sharded_param for each in group.fsdp_params if each.sharded_param.requires_grad)
    padded = {id(each.sharded_param): each.padded_sharded_param_size.numel() for each in group.fsdp_params}
    policy = group.mp_policy
    default = parameters[0].dtype if parameters else torch.float32
    return Unit(
        name,
        parameters,
        padded,
        policy.reduce_dtype or policy.param_dtype or default,
        group.mesh_info.shard_process_group,
        group,
    )


def _check(where: str, group: Any) -> None:
    """Refuse what the exchange would be wrong for."""
    mesh = group.mesh_info
    if getattr(mesh, "replicate_process_group", None) is not None:
        sharded = getattr(mesh, "shard_process_group", None) is not None
        what = "fully_shard over two dimensions (native HSDP)" if sharded else "replicate()"
        remedy = (
            'give fully_shard the shard dimension alone, mesh["shard"]'
            if sharded
            else "use espresso.fsdp.hybrid_shard(model, shards=1) instead"
        )
        raise UnsupportedModelError(
            f"{where} was given {what}, so that PyTorch averages over the replicas itself before anybody could"
            f" compress: {remedy}"
        )
    owner = _owner_of(group)
    is_left = owner is not None and owner.is_over
    if group._all_reduce_hook is not None and not is_left:
        raise UnsupportedModelError(
            f"{where} has an all-reduce hook already; register once, and set no other with set_all_reduce_hook"
        )
    for each in group.fsdp_params:
        if each.is_dtensor:
            raise UnsupportedModelError(
                f"{where} has parameters that are sharded twice (tensor parallel and FSDP), which was never tried"
            )
        if each.fsdp_placement.dim:
            raise UnsupportedModelError(
                f"{where} has parameters that are sharded along another dimension than the first, whose shards are no"
                " stretches of the whole tensor"
            )
        if each.offload_to_cpu and group.device.type != "cpu":
            raise UnsupportedModelError(f"{where} offloads its gradients to the CPU (CPUOffloadPolicy); leave them")
        if getattr(each.sharded_param, "_post_accumulate_grad_hooks", None) and not is_left:
            raise UnsupportedModelError(
                f"{where} has hooks on its parameters that run as soon as a gradient is there"
                " (register_post_accumulate_grad_hook, an optimizer in backward), and by then it is not averaged over"
                " the replicas: step the optimizer after backward"
            )


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have ``call`` run at the end of the backward pass that runs now, after what was asked for before."""
    Variable._execution_engine.queue_callback(call)


def backward_number() -> int:
    """Of the backward pass that runs now; -1 outside one."""
    return int(torch._C._current_graph_task_id())
