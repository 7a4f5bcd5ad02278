"""DDP's buckets laid anew in a running job: all of PyTorch's private names that this takes.

``DistributedDataParallel(bucket_cap_mb=…)`` fixes its buckets when it is made. Which size is best depends on the
network and on what is compressed, which automatic mode knows some steps later. DDP makes a new reducer when it is
unpickled; the same call makes one between two steps, as if the model had been wrapped with another size.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from espresso.comm.module_hooks import StaysBehind

logger = logging.getLogger("espresso")

_HELPER = ("parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph")
_MIB = 1 << 20


class BucketLayout:
    """Lays a model's buckets anew before its next forward pass that trains. All ranks alike.

    Args:
        ddp: holds no reference to it.
        state, hook: what was registered with ``register_comm_hook``.
    """

    def __init__(self, ddp: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
        self._ddp, self._state, self._hook = weakref.ref(ddp), weakref.ref(state), hook
        self._cap: float | None = None
        self._before_forward: Any = None

    def __call__(self, bucket_cap_mb: float) -> bool:
        """Whether the buckets will be laid so (MiB); not where a user gave a size, or a feature depends on them."""
        ddp: Any = self._ddp()
        is_ours = self._cap is not None or getattr(ddp, "bucket_bytes_cap_default", False)
        if ddp is None or bucket_cap_mb == self._cap or not is_ours or _why_not(ddp):
            return False
        self._cap = bucket_cap_mb
        if self._before_forward is None:
            self._before_forward = ddp.register_forward_pre_hook(StaysBehind(self._lay), prepend=True)
        return True

    def _lay(self, module: Any, _args: Any) -> None:
        # A reducer made under inference_mode could not be written to; an evaluation leaves it to the step that follows.
        # In join() a rank that has no inputs never comes by here: the others wait with it.
        if not torch.is_grad_enabled() or is_joining(module):
            return
        self._before_forward.remove()
        self._before_forward = None
        state = self._state()
        if state is not None and self._cap is not None:
            lay_anew(module, self._cap, state, self._hook)


def _why_not(ddp: Any) -> str:
    """What keeps the buckets as they are; empty if nothing does."""
    helper = getattr(ddp, "_ddp_init_helper", None)
    if helper is None or tuple(inspect.signature(helper).parameters) != _HELPER:
        return "this PyTorch makes its reducer in another way"
    for name in ("mixed_precision", "_use_python_reducer", "_delay_all_reduce_params", "static_graph"):
        if getattr(ddp, name, None):
            return name
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.parameters()):
        return "an optimizer that steps in backward"
    return "the model is in join()" if is_joining(ddp) else ""


def is_joining(ddp: Any) -> bool:
    """Whether a model is in DDP's ``join()``, or was: only the next one, with ``enable=False``, takes that back."""
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def held_by(ddp: Any) -> set[int]:
    """The parameters that DDP averages, by ``id``: those that were not frozen when its reducer was made, whatever is
    frozen now. For a moment that takes as much memory as the buckets.
    """
    return {id(parameter) for bucket in ddp.reducer._get_zeros_like_grad_buckets() for parameter in bucket.parameters()}


@contextmanager
def _as_held(ddp: Any) -> Iterator[None]:
    """What DDP averages, and nothing else, requires gradients meanwhile."""
    held = held_by(ddp)
    others = [each for each in ddp.parameters() if each.requires_grad != (id(each) in held)]
    try:
        for each in others:
            each.requires_grad_(id(each) in held)
        yield
    finally:
        for each in others:
            each.requires_grad_(id(each) not in held)


def lay_anew(ddp: Any, bucket_cap_mb: float, state: object, hook: Callable[..., Any]) -> None:
    """Make DDP's reducer anew, with this bucket size, of what it held. Between two steps; gradients that were
    accumulated stay.
    """
    ddp.bucket_bytes_cap, ddp.bucket_bytes_cap_default = int(bucket_cap_mb * _MIB), False
    config = getattr(ddp, "_bucket_config", None)
    if config is not None:
        ddp._bucket_config = type(config).create(
            bucket_cap_mb=bucket_cap_mb, bucket_cap_mb_list=None, use_python_reducer=False
        )
    before = ddp.reducer
    with _as_held(ddp):
        parameters, is_sparse = ddp._build_params_for_reducer()
        names = ddp._build_debug_param_to_name_mapping(parameters)
        ddp._ddp_init_helper(parameters, is_sparse, names, ddp.static_graph)
    before._remove_autograd_hooks()  # not before there is another: one without hooks would average nothing
    ddp._has_rebuilt_buckets = False
    dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
    logger.info("buckets: DDP's were laid anew, as bucket_cap_mb=%g lays them", bucket_cap_mb)
