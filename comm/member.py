"""One process group seen from one rank, and what is done with one alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

_UNUSED_TAG = 1
"""Of messages from rank to rank; collectives of ours that are made of such use 0."""

BEAT_TAG = 2

MAX_CONNECTIONS = 16
"""Between two ranks."""

LONGEST_S = 1e6
"""Of a time-out: eleven days. Clocks of the libraries below overflow later."""


@dataclass(frozen=True)
class Member:
    """A process group seen from one rank: the group, its global ranks in order, this rank's place.

    Attributes:
        others: the same ranks over connections of their own.
    """

    group: Any
    ranks: tuple[int, ...]
    index: int
    others: tuple[Member, ...] = ()

    def connection(self, number: int) -> Member:
        """Which one the exchange with this number takes, on all ranks."""
        place = number % (len(self.others) + 1)
        return self.others[place - 1] if place else self

    @property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def is_gloo(self) -> bool:
        """Whether its transfers take host memory only."""
        return bool(dist.get_backend(self.group) == "gloo")


def gathered(mine: torch.Tensor, num_ranks: int, group: Any) -> list[torch.Tensor]:
    """Everybody's tensor of one shape and type."""
    everybody = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(everybody, mine, group=group)
    return everybody


def break_off(group: Any, index: int, size: int) -> None:
    """Have everything under way in a group end now, with an error.

    Gloo has no call for that, but a wait that times out closes all connections of its group.
    """
    for step in range(1, size):
        try:
            group.recv([torch.empty(1, device="cpu")], (index + step) % size, _UNUSED_TAG).wait(
                timedelta(milliseconds=1)
            )
        except Exception as error:  # a connection that is closed already says so, and leaves the others open
            if "Timed out" in str(error):
                return


class Gathering:
    """A gather, or a sum, that is under way: nobody waits for it until its rows are asked for.

    Attributes:
        took_us: what it took, in microseconds; 0 until it is over, and where it is not timed.
    """

    def __init__(
        self,
        mine: torch.Tensor,
        member: Member,
        explained: Callable[[str], AbstractContextManager[None]],
        *,
        adds: bool,
        timed: bool = False,
    ) -> None:
        self.took_us, self._began = 0.0, time.perf_counter()
        self._rows = [mine] if adds else [torch.empty_like(mine) for _ in range(member.size)]
        self._explained = explained
        self._mine = mine  # until it is sent
        with explained(_GATHERING):  # by the group itself: torch.distributed's functions take 50 us more
            if adds:
                self._work = member.group.allreduce([mine])
            else:
                self._work = member.group.allgather([self._rows], [mine])
        if timed:
            self._work.get_future().add_done_callback(self._stamp)

    def _stamp(self, future: Any) -> None:
        self.took_us = 1e6 * (time.perf_counter() - self._began)

    @property
    def is_done(self) -> bool:
        """Whether :meth:`rows` would return at once."""
        return bool(self._work.is_completed())

    def rows(self) -> torch.Tensor:
        """Everybody's tensor, stacked in rank order, or the one sum; waits at most for the groups' time-out."""
        with self._explained(_GATHERING):
            self._work.wait()
        return torch.stack(self._rows)


_GATHERING = "what the ranks tell each other on the way"
