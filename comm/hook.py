"""DDP's front of a job: the function that DDP calls, and what its buckets hold.

``ddp_model.register_comm_hook(state, espresso_hook)``

DDP reads the annotations of the hook, so this module must not postpone their evaluation.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from espresso.comm.ddp_buckets import is_joining
from espresso.comm.errors import EspressoError, UnsupportedModelError
from espresso.comm.module_hooks import StaysBehind
from espresso.strategies import Bucket


class HookState(Protocol):
    """What the hook needs of a state."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]: ...


def espresso_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket's gradients over all ranks as the state's strategy says.

    Args:
        state: an ``EspressoState``.
        bucket: from DDP; its buffer is changed in place.

    Returns:
        A future of the averaged buffer. It fails with the original error, worded, if the exchange fails.

    Example:
        >>> state = EspressoState(compressor="efsignsgd")          # doctest: +SKIP
        >>> ddp_model.register_comm_hook(state, espresso_hook)     # doctest: +SKIP
    """
    return state.reduce(bucket)


@dataclass(frozen=True)
class Arrived:
    """A bucket of DDP's.

    Attributes:
        index: its place in this backward pass.
        buffer: its numbers, apart from any graph: as in plain DDP, the exchange is no part of it (``create_graph``).
    """

    index: int
    buffer: torch.Tensor
    is_last: bool


class Front:
    """What DDP hands over, as the executor takes it. Buckets are described once: DDP rebuilds them after one step.

    With ``skip_all_reduce_unused_params`` DDP hands over no bucket without gradients: not the first, not the last. Then
    places are counted here, and the end of the backward pass says that no more will come.

    Args:
        module: the model, wrapped in DDP or not.
        names: of the parameters that are averaged, by ``id``.
    """

    def __init__(self, module: torch.nn.Module, names: Mapping[int, str]) -> None:
        self._names = names
        self._known: dict[int, tuple[tuple[int, ...], Bucket]] = {}
        self._count, self._latest = 0, -1
        self._arrived: set[str] = set()
        self._handles: list[Any] = []
        self._learn(module)
        if not isinstance(module, DistributedDataParallel):  # whose flags count
            self._handles.append(module.register_forward_pre_hook(StaysBehind(self._forward)))

    def _learn(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self._skips = bool(getattr(module, "skip_all_reduce_unused_params", False))
        if self.drops_averages:
            for parameter in module.parameters():
                name, needs = self._names.get(id(parameter)), parameter.requires_grad
                if name is not None:
                    register: Any = parameter.requires_grad_(True).register_post_accumulate_grad_hook
                    self._handles.append(register(partial(self._arrives, name)))
                    parameter.requires_grad_(needs)  # what is frozen now may be trained later

    def _arrives(self, name: str, _: torch.Tensor) -> None:
        self._arrived.add(name)

    def detach(self) -> None:
        """Look at the model no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def without_gradient(self, bucket: GradBucket) -> tuple[set[str], set[str]]:
        """Which tensors a bucket has, and those of them that got no gradient since the last exchange: what it holds of
        these is left over from earlier steps. Where averages are dropped; to be asked once. Where gradients are views
        of the bucket, in which averages stay, no tensor is.
        """
        names = {self._names[id(each)] for each in bucket.parameters() if id(each) in self._names}
        silent = names - self._arrived
        self._arrived -= names
        return names, set() if getattr(self._module(), "gradient_as_bucket_view", False) else silent

    def _forward(self, module: torch.nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling():
            return
        ddp: Any = DistributedDataParallel
        wrapper = ddp._get_active_ddp_module()
        if wrapper is not None and getattr(wrapper.module, "_orig_mod", wrapper.module) is module:
            self.detach()
            self._learn(wrapper)

    @staticmethod
    def check(bucket: GradBucket) -> None:
        """Refuse what is no bucket."""
        if not isinstance(bucket, GradBucket):
            raise UnsupportedModelError(
                f"the hook was given a {type(bucket).__name__} instead of a DDP bucket: torch.compile's own"
                " gradient hooks are not supported; compile the module inside DDP instead of the DDP wrapper"
            )

    @staticmethod
    def average(bucket: GradBucket, group: dist.ProcessGroup | None) -> torch.futures.Future[torch.Tensor]:
        """As plain DDP does."""
        everybody = dist.group.WORLD if group is None else group
        assert everybody is not None
        return allreduce_hook(everybody, bucket)

    def begins(self, bucket: GradBucket) -> bool:
        """Whether a bucket that was not taken yet is the first of its backward pass."""
        index = bucket.index()
        # One that is not behind the latest: the pass before ended with an error.
        return index <= self._latest or self._count == 0 if self._may_skip else index == 0

    def take(self, bucket: GradBucket, on_end: Callable[[], torch.futures.Future[torch.Tensor]]) -> Arrived:
        """The next bucket of a backward pass.

        Args:
            on_end: called when the pass has ended, where DDP does not say which bucket is the last.

        """
        buffer, index = bucket.buffer().detach(), bucket.index()
        if not self._may_skip:
            return Arrived(index, buffer, bucket.is_last())
        if self.begins(bucket):
            self._count = 0
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, on_end))
        self._latest, self._count = index, self._count + 1
        return Arrived(self._count - 1, buffer, is_last=False)

    @property
    def _may_skip(self) -> bool:
        """Whether some buckets of a pass may not come. A rank without inputs, in join(), is given all."""
        return self._skips and self.has_inputs()

    @property
    def averages_over_some(self) -> bool:
        """Whether the average is to be over the ranks that still have inputs: join(divide_by_initial_world_size=False).

        DDP does not tell hooks how many those are.
        """
        module: Any = self._module()
        return self.is_joining and not module._divide_by_initial_world_size

    @property
    def is_joining(self) -> bool:
        """Whether the model is in join()."""
        return is_joining(self._module())

    @property
    def drops_averages(self) -> bool:
        """Whether DDP leaves a parameter's gradient as it was where no rank used it in a step, averaged or not."""
        module: Any = self._module()
        return bool(getattr(module, "find_unused_parameters", False)) and not module.static_graph

    @staticmethod
    def has_inputs() -> bool:
        """Whether this rank is in a backward pass of its own; where it joined, DDP calls the hook outside of one."""
        return bool(torch._C._current_graph_task_id() != -1)

    def _ended(self, on_end: Callable[[], torch.futures.Future[torch.Tensor]]) -> None:
        self._count, self._latest = 0, -1
        on_end().wait()

    def describe(self, bucket: GradBucket, arrived: Arrived) -> Bucket:
        """What a bucket holds.

        Raises:
            EspressoError, UnsupportedModelError: parameters of another model, a sparse or padded bucket.
        """
        index, parameters, buffer = arrived.index, bucket.parameters(), arrived.buffer
        dtype = str(buffer.dtype).removeprefix("torch.")
        ids = tuple(map(id, parameters))
        known = self._known.get(index)
        if known is not None and known[0] == ids and known[1].dtype == dtype:
            return known[1]
        numels = []
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is None:
                raise EspressoError(
                    f"bucket {index} holds a parameter of shape {tuple(parameter.shape)} that the bound model does"
                    " not have, or had frozen; bind the state to the DDP model, which knows what it averages"
                )
            numels.append((name, parameter.numel()))
        described = Bucket.packed(index, numels, dtype)
        if described.numel != buffer.numel():
            raise UnsupportedModelError(
                f"bucket {index} has {buffer.numel()} elements for parameters of {described.numel}: sparse or padded"
                " buckets are not supported"
            )
        self._known[index] = (ids, described)
        return described
