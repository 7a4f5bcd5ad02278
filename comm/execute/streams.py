"""Lanes of a GPU job: streams, and the events between them. Nothing here makes the host wait but ``wait_here``.

::

    backward's stream   ... gradients of b0 | event       gradients of b1 | event ...
    training            wait, compress b0 ── event                decompress b0 ── event
    intra / inter                             wait, exchange b0 ── event
    out                                                                   wait, DDP's future of b0
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from espresso.strategies import Lane

STREAM_OF = {
    Lane.TRAINING: "training",
    Lane.OFFLOAD: "copy",
    Lane.COPY: "copy",
    Lane.INTRA: "intra",
    Lane.INTER_OUT: "inter",
    Lane.INTER_IN: "inter",
    Lane.SERVER_IN: "inter",
    Lane.SERVER_OUT: "inter",
}
"""The host's pool has no stream: what it waits for and what waits for it are copies."""

OUT = "out"
POLL_S = 0.002

Event = Any
"""Of a stream: what comes after it may wait for it."""


class Streams(Protocol):
    """What the device executor needs of a device's streams."""

    device: torch.device

    def on(self, name: str) -> AbstractContextManager[Any]:
        """Make a stream the current one of this thread."""
        ...

    def record(self) -> Event:
        """An event at the end of the current stream."""
        ...

    def wait(self, events: Iterable[Event]) -> None:
        """Let the current stream wait for events; the host goes on."""
        ...

    def wait_here(self, event: Event, timeout_s: float) -> bool:
        """Wait on this thread; False if it takes longer."""
        ...

    def elapsed_us(self, begin: Event, end: Event) -> float:
        """Device time between two events that both have come."""
        ...

    def new_future(self) -> torch.futures.Future[torch.Tensor]:
        """A future that remembers the stream current when it is completed."""
        ...


class CudaStreams:
    """A stream for each lane, with events that know the time.

    Streams come before backward's in priority: their kernels are short, and exchanges wait for them.

    Args:
        device: of the model.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        names = {*STREAM_OF.values(), OUT}
        make: Any = torch.cuda.Stream
        self._streams = {name: make(device, priority=-1) for name in sorted(names)}

    def on(self, name: str) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._streams[name])
        return context

    def record(self) -> Event:
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, events: Iterable[Event]) -> None:
        current = torch.cuda.current_stream(self.device)
        for event in events:
            current.wait_event(event)

    def wait_here(self, event: Event, timeout_s: float) -> bool:
        """Polls, since a wait for a device cannot be ended, and an exchange may hang."""
        end = time.monotonic() + timeout_s
        while not event.query():
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S / 20)
        return True

    def elapsed_us(self, begin: Event, end: Event) -> float:
        return float(begin.elapsed_time(end)) * 1e3

    def new_future(self) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self.device])
        return future
