"""What a server holds: the keys that workers agreed on, their tags and engines, and the residuals of every state."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.comm.keep.store import ResidualStore
from espresso.comm.memory import Codecs
from espresso.comm.parameter_server.places import balance
from espresso.comm.parameter_server.sums import KeySum
from espresso.comm.parameter_server.wire import Held, Installed, Key, Table, Tag
from espresso.strategies import Site

PATIENCE = 0.9
"""Of the workers' time-out: who knows which worker is missing speaks before those who only wait."""


class Offers(dict[int, Table]):
    """The tables that workers have sent of those that are to be equal, by worker.

    Attributes:
        tags: of the workers' answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tags: dict[int, int] = {}
        self.first_s = time.monotonic()

    @property
    def limit_s(self) -> float:
        """How long the others may wait for the last of them."""
        return PATIENCE * min(table.timeout_s for table in self.values())

    def missing(self) -> int | None:
        """A worker that has had nine tenths of the time and said nothing."""
        if not self or time.monotonic() - self.first_s <= self.limit_s:
            return None
        workers = next(iter(self.values())).workers
        return min(set(workers) - set(self), default=None)

    def disagreement(self) -> str | None:
        """What is wrong with the tables of all workers, or None."""
        ranks = sorted(self)
        first = self[ranks[0]]
        for rank in ranks[1:]:
            theirs = self[rank]
            if theirs.strategy != first.strategy:
                return (
                    f"worker rank {rank} has another strategy than rank {ranks[0]} (hash {theirs.strategy[:12]}…, not"
                    f" {first.strategy[:12]}…); start all ranks alike"
                )
            if theirs.keys != first.keys or theirs.only != first.only:
                return f"worker rank {rank} cut the gradients otherwise than rank {ranks[0]}; start all ranks alike"
        return None


class _Residuals(ResidualStore):
    """A state's. What finds no place waits as it is: carried, it would be whole tensors, of every server."""

    def add_carry(self, tensor: str, start: int, values: npt.NDArray[Any], numel: int) -> None:
        if np.any(values):
            self._waiting.setdefault((tensor, Site.SERVER), []).append((start, values, 0))

    def hand_over(self) -> tuple[Held, ...]:
        """What has found no place; it is the first worker's from now on."""
        waiting, self._waiting = self._waiting, {}
        return tuple(Held(tensor, start, values) for (tensor, _), each in waiting.items() for start, values, _ in each)


class Holdings:
    """The keys of one server. Not thread-safe: the server's lock guards it.

    Args:
        index: of the server among the servers.
        engines: threads that add up; keys are dealt out to them by their bytes.
    """

    def __init__(self, index: int, codecs: Codecs, engines: int) -> None:
        self._index, self._codecs = index, codecs
        self._keys: dict[int, KeySum] = {}
        self._stores: dict[int, _Residuals] = {}
        self._patience_s: dict[int, float] = {}
        self._staying: dict[int, set[int]] = {}
        self._load = [0] * engines

    def __iter__(self) -> Iterator[KeySum]:
        return iter(self._keys.values())

    def get(self, number: int) -> KeySum | None:
        return self._keys.get(number)

    def patience_s(self, key: Key) -> float:
        """How long a key may wait for its last push."""
        return self._patience_s[key.namespace]

    def is_overdue(self, summed: KeySum) -> bool:
        waits = 0 < len(summed.arrived) < len(summed.key.workers)
        return waits and time.monotonic() - summed.first_s > self.patience_s(summed.key)

    # -- tables ----------------------------------------------------------------------------------

    def refusal(self, table: Table) -> str | None:
        """Why this server cannot take a table, or None."""
        stay = len(self._keys) - len(self._replaced(table))
        come, room = sum(key.server == self._index for key in table.keys), Tag.LAST - Tag.FIRST + 1
        if stay + come <= room:
            return None
        return f"{stay + come} keys are more than its {room} message tags; use larger partitions or more servers"

    def install(self, table: Table) -> tuple[Installed, list[KeySum]]:
        """Take a table's keys. Returns the answer, and the keys it replaces: their last answers may be on the way."""
        store = self._stores.get(table.namespace)
        if store is None:
            store = self._stores[table.namespace] = _Residuals(transactional=table.transactional, gain=table.gain)
        self._patience_s[table.namespace] = PATIENCE * table.timeout_s
        self._staying.setdefault(table.namespace, set(table.workers))
        retired = self._retire(table)
        mine = [key for key in table.keys if key.server == self._index]
        engines = balance([key.load_bytes for key in mine], len(self._load), self._load)
        sums = [
            KeySum(key, self._codecs, store, tag, engine)
            for key, tag, engine in zip(mine, self._free_tags(), engines, strict=False)
        ]
        store.adopt([s.residual for s in sums if s.residual is not None], table.numels, only=table.only)
        for summed in sums:
            self._keys[summed.key.number] = summed
            self._load[summed.engine] += summed.key.load_bytes
        return Installed(store.hand_over(), {summed.key.number: summed.tag for summed in sums}), retired

    def _free_tags(self) -> Iterator[int]:
        taken = {summed.tag for summed in self}
        return (tag for tag in range(Tag.FIRST, Tag.LAST + 1) if tag not in taken)

    def _retire(self, table: Table) -> list[KeySum]:
        """Forget the keys that the table replaces.

        Only their last round is known to count or not: other buckets may have had theirs in this very iteration.
        """
        retired = self._replaced(table)
        for summed in retired:
            summed.settle_unless(table.discarded)
            self._drop(summed)
        return retired

    def _drop(self, summed: KeySum) -> None:
        self._load[summed.engine] -= summed.key.load_bytes
        del self._keys[summed.key.number]

    def _replaced(self, table: Table) -> list[KeySum]:
        return [
            summed
            for summed in self._of(table.namespace)
            if table.only is None or not table.only.isdisjoint(s.tensor for s in summed.key.stretches)
        ]

    def leave(self, worker: int, namespace: int | None = None) -> None:
        """A worker has left a state, or all of them; what no worker is left to use is let go."""
        for number in self._staying.keys() & (self._staying if namespace is None else {namespace}):
            self._staying[number].discard(worker)
            if not self._staying[number]:
                for summed in self._of(number):
                    self._drop(summed)
                del self._stores[number], self._patience_s[number], self._staying[number]

    # -- residuals -------------------------------------------------------------------------------

    def _of(self, namespace: int) -> list[KeySum]:
        return [summed for summed in self if summed.key.namespace == namespace]

    def _settled(self, namespace: int, discarded: frozenset[int]) -> ResidualStore:
        """A state's residuals, the last round of each counted or not."""
        for summed in self._of(namespace):
            summed.settle_unless(discarded)
        return self._stores.get(namespace, ResidualStore())

    def place(self, namespace: int, pieces: Iterable[Held]) -> None:
        """Add residual values to the keys that hold their range."""
        for piece in pieces:
            self._stores[namespace].place(piece.tensor, Site.SERVER, (piece.start, piece.values, 0))

    def fetch(self, namespace: int, discarded: frozenset[int], share: int, num_shares: int) -> list[Held]:
        """A share of everything kept, as it would be if training stopped here: each worker saves one."""
        found = []
        for whole in self._settled(namespace, discarded).lend():
            low, high = (whole.numel * each // num_shares for each in (share, share + 1))
            if low < high:
                mine = whole.cut(low, high)
                found.append(Held(mine.tensor, mine.start, mine.read()))
        return found

    def reset(self, namespace: int) -> None:
        """Keep nothing: a checkpoint is about to be loaded."""
        store = self._settled(namespace, frozenset())
        store.load({}, {}, {})

    def rescale(self, namespace: int, discarded: frozenset[int], factors: dict[str, float]) -> None:
        """Multiply what is kept of the named tensors: the units of their gradients changed."""
        self._settled(namespace, discarded).rescale(factors)
