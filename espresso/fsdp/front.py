"""FSDP's front of a job: flat gradients of modules become buckets, and averages become gradients.

::

    backward      FSDP sums a module's flat gradient over the shards
      1. arrive     the all-reduce hook: which module, which flat tensor
      2. place      a gradient of it is in place; with the last the exchange over the replicas starts
                                                                                     ... backward goes on
      3. finish     backward has ended, no bucket comes any more: wait for all exchanges
      4. settle     averages into gradients of another dtype, and onto what was accumulated before

FSDP divides and casts a flat gradient after its hook, so an exchange must not start inside it. FSDP calls a parameter's
own hooks once its gradient is in place. Where nothing is cast, gradients are views of the flat tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from espresso.comm.errors import EspressoError
from espresso.fsdp.private import Unit, at_end_of_backward, backward_number
from espresso.live.names import dtype_name
from espresso.live.state import EspressoState
from espresso.strategies import Bucket, Slot


@dataclass(eq=False)
class Arrival:
    """A flat gradient in this backward pass.

    Attributes:
        flat: of the unit's parameters that have a gradient, one after the other, each with its padding.
        held_back: it is not for the replicas yet.
        filled: elements whose gradients are in place.
        gradients: where each begins in ``flat``, its parameter, and what FSDP made of it: a view of ``flat``, or a
            copy of another dtype.
    """

    flat: torch.Tensor
    held_back: bool
    filled: int = 0
    gradients: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def write_back(self) -> None:
        """Let gradients that are copies have the average."""
        for start, _, gradient in self.gradients:
            if gradient.dtype is not self.flat.dtype:
                gradient.copy_(self.flat[start : start + gradient.numel()].view_as(gradient))


class Front:
    """Stands between FSDP's modules and a job.

    Args:
        state: whose session averages.
        units: what FSDP reduces together.
        names: of their parameters, by ``id``.
    """

    def __init__(self, state: EspressoState, units: list[Unit], names: dict[int, str]) -> None:
        self._state, self._names = state, names
        self._buckets: dict[tuple[int, tuple[int, ...], torch.dtype], Bucket] = {}
        self._held_back: dict[Unit, torch.Tensor] = {}
        self._backward: int | None = None
        self._error: EspressoError | None = None
        self._forget()
        self._units, self._handles = units, list[Any]()
        for unit in units:
            unit.hook(partial(self._arrive, unit), self)
            for parameter in unit.parameters:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(partial(self._place, unit)))

    @property
    def is_over(self) -> bool:
        """As :class:`espresso.fsdp.private.Owner`: its hooks raise."""
        return self._state.is_closed

    def leave(self) -> None:
        """As :class:`espresso.fsdp.private.Owner`."""
        for unit in self._units:
            unit.hook(None)
        for handle in self._handles:
            handle.remove()

    def _forget(self) -> None:
        """What belongs to one exchange of all units."""
        self._accumulated: dict[torch.Tensor, torch.Tensor] = {}
        self._filling: dict[Unit, Arrival] = {}
        self._under_way: list[tuple[Arrival, torch.futures.Future[torch.Tensor]]] = []
        self._seen: set[Unit] = set()

    # -- 1 -------------------------------------------------------------------------------------------

    def _arrive(self, unit: Unit, flat: torch.Tensor) -> None:
        """The flat gradient is summed over the shards."""
        self._state.running()
        self._enter()
        if unit in self._seen:
            # A module whose calls train different parameters comes for each call. A tensor has one residual, which must
            # be settled before it is used again.
            self._guarded(self._finish)
        for parameter in unit.parameters:
            if parameter.grad is not None:
                self._accumulated[parameter] = parameter.grad
                parameter.grad = None
        earlier = self._held_back.pop(unit, None)
        if earlier is not None:
            flat += earlier
        if unit.is_held_back:
            self._held_back[unit] = flat.clone()
        self._filling[unit] = Arrival(flat, unit.is_held_back)
        self._seen.add(unit)

    def _enter(self) -> None:
        """Take note of the backward pass that runs, and be called at its end."""
        if self._backward is None:
            self._backward = backward_number()
            # Modules that were sharded beside each other each have an end of their own, at which FSDP reduces what is
            # left. All are asked for by the time the first call comes, so that the second is behind them.
            at_end_of_backward(partial(at_end_of_backward, self._leave))
        elif self._backward != backward_number():
            raise EspressoError(
                "a backward pass began before the last one ended, so that some gradients were not averaged over the"
                " replicas: checkpoint activations with use_reentrant=False, and after an error in forward or backward"
                " start again from a checkpoint"
            )

    # -- 2 -------------------------------------------------------------------------------------------

    def _place(self, unit: Unit, parameter: torch.Tensor) -> None:
        """A parameter's gradient is in place."""
        arrival = self._filling.get(unit)
        if arrival is None or not isinstance(parameter.grad, DTensor):
            return
        arrival.gradients.append((arrival.filled, parameter, parameter.grad.to_local()))
        arrival.filled += unit.padded[id(parameter)]
        if arrival.filled < arrival.flat.numel():
            return
        del self._filling[unit]
        if arrival.held_back:
            for _, each, _ in arrival.gradients:
                each.grad = None
        else:
            self._guarded(partial(self._start, arrival))

    def _start(self, arrival: Arrival) -> None:
        session, index = self._state.running(), len(self._under_way)
        if index == 0:
            session.scale.begin()
        describe = partial(self._describe, index, arrival)
        average = session.exchange(index, arrival.flat, is_last=False, describe=describe)
        self._under_way.append((arrival, average))

    def _guarded(self, act: Callable[[], None]) -> None:
        """Keep an error for the end of backward: until then the ranks of this copy wait for each other in FSDP."""
        if self._error is None:
            try:
                act()
            except EspressoError as error:
                self._error = error

    def _describe(self, index: int, arrival: Arrival) -> Bucket:
        """What a flat gradient holds; padding is in no slot."""
        key = index, tuple(id(parameter) for _, parameter, _ in arrival.gradients), arrival.flat.dtype
        if key not in self._buckets:
            slots = [
                Slot(self._names[id(parameter)], start, gradient.numel())
                for start, parameter, gradient in arrival.gradients
                if gradient.numel()
            ]
            self._buckets[key] = Bucket(index, tuple(slots), dtype_name(arrival.flat.dtype))
        return self._buckets[key]

    # -- 3, 4 ----------------------------------------------------------------------------------------

    def _leave(self) -> None:
        """Backward has ended."""
        self._backward = None
        self._guarded(self._finish)
        error, self._error = self._error, None
        if error is not None:
            self._forget()
            raise error

    @torch.no_grad()
    def _finish(self) -> None:
        """Have every gradient that arrived averaged.

        Raises:
            EspressoError: the exchange failed, or parameters are not those that were registered.
        """
        under_way, accumulated, filling = self._under_way, self._accumulated, self._filling
        self._forget()
        if filling:
            name = next(iter(filling)).name
            where = f"module {name!r}" if name else "the model"
            raise EspressoError(
                f"{where} has other parameters than when it was registered (were they replaced, moved or unfrozen?), so"
                " that their gradients cannot be averaged: close() the state, and call espresso.fsdp.register again"
                " when the model is complete"
            )
        if under_way:
            over = self._state.running().end()
            for arrival, average in under_way:
                average.wait()
                arrival.write_back()
            over.wait()
        for parameter, before in accumulated.items():
            added = parameter.grad
            if isinstance(added, DTensor) and isinstance(before, DTensor):
                before.to_local().add_(added.to_local())
            parameter.grad = before
