"""What one state has at the servers: its keys, and their residuals seen from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np

from espresso.comm.errors import EspressoError
from espresso.comm.keep.store import Address, Piece, ResidualStore
from espresso.comm.messages import Bytes
from espresso.comm.parameter_server.client import Client, Line
from espresso.comm.parameter_server.places import Bearing, place
from espresso.comm.parameter_server.wire import Flag, Header, Held, Installed, Key, Op, Stretch, Table, key_numbers
from espresso.strategies import CompressorSpec, Site


class Link:
    """What one state has at the servers: its keys, and their residuals seen from here.

    Args:
        ranks: the workers that train together, in order.
        store: this rank's residuals; it saves and loads the servers' through this link.
        timeout_s: for everything; a server that compiles says every second that it lives.
        namespace: the first worker's ``client.new_namespace()``, on all workers of the group.
        bearing: what the servers bear, the same on all workers; by default their cards are taken to be alike.
    """

    def __init__(
        self,
        client: Client,
        ranks: Sequence[int],
        store: ResidualStore,
        timeout_s: float,
        namespace: int,
        bearing: Bearing | None = None,
    ) -> None:
        self.client, self._ranks, self._store, self.timeout_s = client, tuple(ranks), store, timeout_s
        self._bearing = bearing
        self._namespace, self._numbers = namespace, key_numbers(namespace)
        self._next_numbers = cycle(self._numbers)
        self._live: dict[int, Key] = {}
        self._discarded: set[int] = set()
        self._waiting: list[Held] = []
        self._let_go = False
        self._release: Callable[[], None] = lambda: None
        store.remote = self

    @property
    def answers(self) -> bool:
        """Whether this worker speaks for all: the first of the group."""
        return self.client.rank == self._ranks[0]

    def on_failure(self, listener: Callable[[EspressoError], None]) -> None:
        self._release = self.client.on_failure(listener)

    def wait_for_notice(self, timeout_s: float) -> EspressoError | None:
        """What a server says of a failure, if one speaks in time: servers know which worker is gone."""
        deadline = time.monotonic() + timeout_s
        while self.client.error is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.client.error

    def close(self) -> None:
        self._release()

    def leave(self) -> None:
        """Have the servers let go of this state, once all its workers have left it.

        Only where every push was pulled, and nothing more will be pushed.
        """
        self._let_go |= any(key.keeps_residual for key in self._live.values())
        self._live.clear()
        self.client.close_state(self._namespace, self.timeout_s)

    def prepare(self, specs: Iterable[CompressorSpec], dtypes: Iterable[str]) -> None:
        """Have the servers compile what they will run; the first worker asks, the others go on."""
        if self.answers:
            self._ask_everybody(Op.PREPARE, (set(specs), set(dtypes)))

    def _ask_everybody(self, op: Op, body: Any) -> dict[int, Any]:
        """The answers of all servers to one question."""
        bodies = dict.fromkeys(range(self.client.num_servers), body)
        return self.client.ask_all(op, bodies, self.timeout_s)

    # -- tables ----------------------------------------------------------------------------------

    def needs(self, keys: Sequence[Key], only: Collection[str] | None) -> bool:
        """Whether the servers must hear of a new plan: it uses them, or what it replaces did."""
        return bool(keys) or any(self._touches(key, only) for key in self._live.values())

    def install(
        self,
        keys: Sequence[Key],
        lines: Mapping[int, Line],
        numels: Mapping[str, int],
        only: Collection[str] | None,
        strategy: str,
        server: int | None = None,
    ) -> None:
        """Agree with servers and workers on new keys; move residuals to where the keys lie now.

        Waits for the other workers, at most for the time-out: hold no lock that ends the wait of somebody else.

        Args:
            keys: of all ranks of the group, the same list on each, not numbered yet.
            lines: this rank's, by place in ``keys``; they get their numbered keys.
            only: tensors whose earlier keys they replace; None: all.
            strategy: its digest.
            server: where all of them are to lie; None: as the servers bear.

        Raises:
            DisagreementError: another worker has another strategy or cut.
            EspressoError: more keys than there are numbers.
        """
        for number in [n for n, key in self._live.items() if self._touches(key, only)]:
            del self._live[number]
        total, most = len(self._live) + len(keys), len(self._numbers)
        if total > most:
            raise EspressoError(f"{total} keys of one job at its servers are more than {most}: use larger partitions")
        places = [server or 0] * len(keys)
        if server is None:
            places = place(keys, self._bearing or self.client.bearing, self._live.values())
        free = (number for number in self._next_numbers if number not in self._live)
        numbered = [
            replace(key, number=number, server=where) for key, where, number in zip(keys, places, free, strict=False)
        ]
        for index, line in lines.items():
            line.key = numbered[index]
        self._live |= {key.number: key for key in numbered}
        table = Table(
            self._namespace,
            self._ranks,
            tuple(numbered),
            dict(numels),
            None if only is None else frozenset(only),
            strategy,
            self._store.transactional,
            self._store.gain,
            frozenset(self._discarded),
            self.timeout_s,
        )
        answers: dict[int, Installed] = self._ask_everybody(Op.INSTALL, table)
        for line in lines.values():
            line.tag = answers[line.key.server].tags[line.key.number]
        self._resettle([piece for answer in answers.values() for piece in answer.orphans], numels)

    def settle_waiting(self, numels: Mapping[str, int]) -> None:
        """Loaded residuals of tensors that are known now and do not go through servers: this rank carries them."""
        if self._waiting:
            self._resettle([], numels)

    def _touches(self, key: Key, only: Collection[str] | None) -> bool:
        return only is None or any(stretch.tensor in only for stretch in key.stretches)

    def _resettle(self, orphans: Sequence[Held], numels: Mapping[str, int]) -> None:
        """Give pieces to the keys that hold their ranges now; what is in no key is carried by this rank."""
        known = [piece for piece in self._waiting if piece.tensor in numels]
        self._waiting = [piece for piece in self._waiting if piece.tensor not in numels]
        homes: dict[str, list[tuple[Stretch, int]]] = {}
        for key in self._live.values():
            for stretch in key.stretches if key.keeps_residual else ():
                homes.setdefault(stretch.tensor, []).append((stretch, key.server))
        shares: dict[int, list[Held]] = {}
        for piece in [*orphans, *known]:
            left = piece.values.copy()
            for stretch, server in homes.get(piece.tensor, ()):
                low = max(stretch.start, piece.start) - piece.start
                high = min(stretch.start + stretch.numel, piece.start + left.size) - piece.start
                if low < high:
                    if np.any(left[low:high]):
                        part = Held(piece.tensor, piece.start + low, left[low:high].copy())
                        shares.setdefault(server, []).append(part)
                    left[low:high] = 0
            self._store.add_carry(piece.tensor, piece.start, left, numels[piece.tensor])
        # One after the other: this rank's card carries them all, and a server that has its own would wait for us.
        for server, pieces in shares.items():
            self.client.ask_all(Op.PLACE, {server: (self._namespace, pieces)}, self.timeout_s)

    # -- rounds ----------------------------------------------------------------------------------

    def push(self, line: Line, data: Bytes, answer: Bytes, step: int, scale: float) -> None:
        """Send this round's push of a line; ``answer`` is where the pull will lie."""
        kept = line.last_step >= 0 and line.last_step not in self._discarded
        flags = Flag.KEPT if kept else Flag.NONE
        if line.key.is_plain:
            flags |= Flag.RAW
        header = Header(Op.PUSH, self.client.rank, line.key.number, flags, step, data.nbytes, scale)
        self.client.push(line, data, answer, header, self.timeout_s)

    def pull(self, line: Line) -> None:
        self.client.pull(line, self.timeout_s)

    def settled(self, step: int, counts: bool) -> None:
        """An iteration is over; one that does not count leaves the servers' residuals as they were."""
        if not counts:
            self._discarded.add(step)

    # -- what checkpoints need -------------------------------------------------------------------

    def snapshot(self) -> dict[Address, list[Piece]]:
        """This worker's share of the servers' residuals.

        All workers save at the same step: until the last of them has fetched its share, no round is complete.

        Raises:
            EspressoError: it has left, and the servers have let go of them.
        """
        if self._let_go:
            raise EspressoError("the servers let go of this state's residuals when it was closed; save it before that")
        body = (self._namespace, frozenset(self._discarded), self._ranks.index(self.client.rank), len(self._ranks))
        held = list(self._waiting)
        if self._live:
            held += [piece for pieces in self._ask_everybody(Op.FETCH, body).values() for piece in pieces]
        found: dict[Address, list[Piece]] = {}
        for piece in held:
            found.setdefault((piece.tensor, Site.SERVER), []).append((piece.start, piece.values, 0))
        return found

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiply what the servers keep of the named tensors; between iterations, all workers alike.

        The first worker asks: the others know that it is done when the next round is over.
        """
        # Anew: a save that is under way may have been lent these.
        self._waiting = [replace(p, values=p.values * np.float32(factors.get(p.tensor, 1.0))) for p in self._waiting]
        if self.answers and self._live:
            body = (self._namespace, frozenset(self._discarded), dict(factors))
            self._ask_everybody(Op.RESCALE, body)

    def reset(self) -> None:
        """Have the servers keep nothing; they know when the first worker is back."""
        self._discarded.clear()
        if self.answers and self._live:
            self._ask_everybody(Op.RESET, (self._namespace,))

    def load(self, pieces: Mapping[Address, Sequence[Piece]], numels: Mapping[str, int]) -> None:
        """Give the servers, once they are reset, this worker's pieces; what no key keeps yet waits for the keys."""
        self._waiting = [
            Held(tensor, start, values)
            for (tensor, _), parts in pieces.items()
            for start, values, replica in parts
            if replica == 0
        ]
        live = {stretch.tensor for key in self._live.values() for stretch in key.stretches}
        self._resettle([], {tensor: numels[tensor] for tensor in live})
