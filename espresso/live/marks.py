"""Where a training script is: moments of forward, backward and optimizer, from hooks that every wrapper leaves free.

A few calls a step, whatever the model's size. Backward's end and the moment when DDP's averages are there come from
the autograd engine, which calls back after its graph, and then, in turn, after DDP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from espresso.comm.module_hooks import StaysBehind
from espresso.live.recorder import Recorder, now_us
from espresso.live.script import OurOptimizers

logger = logging.getLogger("espresso")

_queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback

DEPTH, MOST_OUTPUTS = 4, 16
"""So deep a model's output is searched for tensors with a gradient, and for so many of them."""

PATIENCE = 8
"""Steps after which it is said what of them is not seen."""


class ScriptMarks:
    """Notes a script's moments in a recorder, while it is attached to a module.

    Args:
        module: whose forward and backward passes count, wrapped in DDP or not.
        ours: ``id`` of every parameter whose optimizer counts.
        on_averaged: called once backward has returned all averages.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        ours: Collection[int],
        recorder: Recorder,
        on_averaged: Callable[[], None] = lambda: None,
    ) -> None:
        self._recorder, self._ours, self._on_averaged = recorder, OurOptimizers(ours), on_averaged
        self._passes, self._finds = 0, False
        self._handles: list[Any] = [
            module.register_forward_pre_hook(StaysBehind(self._enter)),
            module.register_forward_hook(StaysBehind(self._forward_end)),
            register_optimizer_step_pre_hook(self._optimizer),
            register_optimizer_step_post_hook(self._optimizer_end),
        ]
        if isinstance(module, DistributedDataParallel) and buffer_bytes(module):
            # Between the two DDP broadcasts the buffers.
            self._handles.append(module.module.register_forward_pre_hook(StaysBehind(self._forward)))

    def detach(self) -> None:
        """Look no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._recorder.enter()

    def _forward(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._recorder.script.forward_us = now_us()

    def _forward_end(self, module: object, inputs: object, output: object) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._recorder.script.forward_end_us = now_us()
            found = [*islice(_with_gradient(output), MOST_OUTPUTS)]
            for each in found:
                each.register_hook(self._backward)  # type: ignore[no-untyped-call]
            self._passes, self._finds = self._passes + 1, self._finds or bool(found)
            if self._passes == PATIENCE and not self._finds:
                logger.warning(
                    "espresso finds no tensor with a gradient in what the model returns (%s), and does not see its"
                    " backward passes: return tensors, or tuples, lists, mappings or dataclasses of them",
                    type(output).__name__,
                )

    def _backward(self, _: torch.Tensor) -> None:
        recorder, script = self._recorder, self._recorder.script
        # A graph that ended and sent nothing was no backward pass, but ``autograd.grad`` of these outputs.
        if script.backward_us is None or (script.backward_end_us is not None and not recorder.has_begun):
            script.backward_us, script.backward_end_us, script.averaged_us = now_us(), None, None
            _queue_callback(self._backward_end)

    def _backward_end(self) -> None:
        self._recorder.script.backward_end_us = now_us()
        # Behind DDP's own, and FSDP's, which is queued by one that is queued: these wait for the averages.
        _queue_callback(partial(_queue_callback, self._averaged))

    def _averaged(self) -> None:
        self._recorder.script.averaged_us = now_us()
        self._on_averaged()

    def _optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        script = self._recorder.script
        if script.optimizer_us is None and optimizer in self._ours:
            script.optimizer_us = now_us()

    def _optimizer_end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._ours:
            self._recorder.script.optimizer_end_us = now_us()


def buffer_bytes(module: DistributedDataParallel) -> int:
    """Bytes of the buffers that DDP broadcasts before every forward pass."""
    if not module.broadcast_buffers:
        return 0
    buffers: Any = module.modules_buffers
    return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def facts_of(module: torch.nn.Module) -> dict[str, Any]:
    """What a flight record says of DDP's settings."""
    if not isinstance(module, DistributedDataParallel):
        return {}
    cap: Any = module.bucket_bytes_cap
    return {"buffer_bytes": buffer_bytes(module), "bucket_cap_mb": cap / (1 << 20)}


def _with_gradient(output: object, depth: int = DEPTH) -> Iterator[torch.Tensor]:
    """The outputs that a loss may be made of, which need not be the first."""
    if isinstance(output, torch.Tensor):
        if output.grad_fn is not None:  # a parameter would keep the hook for good
            yield output
    elif depth:
        if is_dataclass(output):
            output = [getattr(output, each.name, None) for each in fields(output)]
        inner = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
        for each in inner:
            yield from _with_gradient(each, depth - 1)
