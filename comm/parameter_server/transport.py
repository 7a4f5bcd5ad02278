"""Point-to-point messages between workers and servers: one small interface, two implementations.

Ranks count workers first, then servers. Two channels: control messages never wait behind gradients. Buffers are
contiguous uint8 arrays that stay untouched until their ``Pending`` is over.
"""

from __future__ import annotations

import re
import time
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol

import torch

from espresso.comm.errors import EspressoError
from espresso.comm.messages import Bytes

FOREVER = timedelta(days=365)


class Channel(Enum):
    CONTROL = "control"
    DATA = "data"


class LinkError(EspressoError):
    """A message did not get through: the other side is gone, hangs or cannot be reached.

    Attributes:
        peer: the rank at the other end, where a transport found out.
    """

    def __init__(self, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.peer = peer


class Deadline:
    """The end of several waits in a row."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """At least a moment: what is there already is taken."""
        return max(self._end - time.monotonic(), 0.01)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._end


class Pending(Protocol):
    """A message under way."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the buffer may be used again; None waits without a limit.

        Raises:
            LinkError: the peer is gone, or the time is over.
        """
        ...


class Transport(Protocol):
    """Messages between ``size`` ranks; thread-safe. Messages of one (channel, peer, tag) keep their order."""

    rank: int
    size: int

    def send(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending: ...

    def receive(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending: ...

    def close(self) -> None: ...


def _worded(error: RuntimeError) -> str:
    """Gloo's error without its source lines and advice."""
    return re.sub(r"\[\S+\.(cc|cpp|h):\d+\] ", "", str(error)).partition(". This is typically")[0]


class _GlooPending:
    def __init__(self, work: Any, peer: int, buffer: torch.Tensor) -> None:
        self._work, self._peer, self._buffer = work, peer, buffer

    def wait(self, timeout_s: float | None = None) -> None:
        try:
            self._work.wait(FOREVER if timeout_s is None else timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise LinkError(f"rank {self._peer}: {_worded(error)}", self._peer) from error


class GlooTransport:
    """Gloo's point-to-point transfers, over process groups of its own.

    Args:
        store: where the ranks find each other (``torch.distributed.Store``); a prefix of its own is used.
        timeout_s: for connecting.

    Raises:
        LinkError: the ranks could not be connected.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float = 60.0) -> None:
        from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

        self.rank, self.size = rank, size
        self._groups: dict[Channel, Any] = {}
        for channel in Channel:
            prefix = PrefixStore(f"espresso-servers-{channel.value}", store)
            try:
                group = ProcessGroupGloo(prefix, rank, size, timedelta(seconds=timeout_s))
            except RuntimeError as error:
                raise LinkError(f"rank {rank} could not connect to the other {size - 1} ranks: {error}") from error
            self._groups[channel] = group

    def send(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending:
        buffer = torch.from_numpy(data)
        return self._start(self._groups[channel].send, buffer, peer, tag)

    def receive(self, channel: Channel, peer: int, tag: int, data: Bytes) -> Pending:
        buffer = torch.from_numpy(data)
        return self._start(self._groups[channel].recv, buffer, peer, tag)

    def _start(self, call: Any, buffer: torch.Tensor, peer: int, tag: int) -> Pending:
        try:
            return _GlooPending(call([buffer], peer, tag), peer, buffer)
        except RuntimeError as error:
            raise LinkError(f"rank {peer}: {_worded(error)}", peer) from error

    def close(self) -> None:
        self._groups.clear()
