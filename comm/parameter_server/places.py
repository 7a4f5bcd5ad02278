"""Which server holds which key: what each card and processor bears, and which of them has least to do so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from espresso.comm.parameter_server.wire import Key
from espresso.strategies import BOTH_MUST_SAVE, Sharing, shares_by_rule


@dataclass(frozen=True)
class Bearing:
    """What servers bear.

    Attributes:
        machines: a number for each server's machine; equal where servers share one and its card.
        near: for each server, the part of all workers that runs on its machine: what they push and pull crosses its
            card too, unless it stays there. 0 for a server with a machine of its own.
        card_us: for each server, per KB over its card. Equal where nothing was measured.
        processor_us: for each server, per KB of raw numbers (those in payloads count as what they are decoded to).
        sharing: what is even: time, or the sizes of uncompressed gradients.
    """

    machines: tuple[int, ...]
    near: tuple[float, ...]
    card_us: tuple[float, ...]
    processor_us: tuple[float, ...]
    sharing: Sharing = Sharing.MEASURED

    @classmethod
    def alike(cls, machines: Sequence[int], near: Sequence[float], sharing: Sharing = Sharing.MEASURED) -> Bearing:
        """Before anything was measured: cards are alike, and all that counts."""
        return cls(tuple(machines), tuple(near), (1.0,) * len(machines), (0.0,) * len(machines), sharing)

    @property
    def speeds(self) -> tuple[tuple[float, float], ...]:
        """(card, processor) of every server as a part of the fastest."""
        cards, processors = min(self.card_us), max(min(self.processor_us), 1e-9)
        return tuple(
            (cards / card, min(processors / max(processor, 1e-9), 1.0))
            for card, processor in zip(self.card_us, self.processor_us, strict=True)
        )


class _Load:
    """What cards and processors have to do, in microseconds, and every server's gradients, uncompressed.

    Where all workers are on one machine, nothing crosses its card that its own servers hold.
    """

    def __init__(self, bearing: Bearing) -> None:
        self._bearing = bearing
        self._cards = dict.fromkeys(bearing.machines, 0.0)
        self._processors, self._answers, self.sizes = ([0.0] * len(bearing.machines) for _ in range(3))

    def pass_by(self, key: Key) -> None:
        """What a key's pushes and pulls take of the cards of machines that have both workers and servers."""
        bearing, done = self._bearing, set()
        for machine, near, us in zip(bearing.machines, bearing.near, bearing.card_us, strict=True):
            if machine not in done and near < 1.0:
                done.add(machine)
                self._cards[machine] += us * near * key.load_bytes / 1e3

    def after(self, key: Key, server: int) -> tuple[float, float]:
        """When a server would be done with ``key`` too: its processor and its card, and what the card has to send back
        when all is pushed; and its size so far.
        """
        card, processor, answer = self._with(key, server)
        return max(card, processor) + answer, self.sizes[server]

    def take(self, key: Key, server: int) -> None:
        """Have ``server`` hold ``key``."""
        card, self._processors[server], self._answers[server] = self._with(key, server)
        self._cards[self._bearing.machines[server]] = card
        self.sizes[server] += key.raw_bytes

    @property
    def over_us(self) -> float:
        """When all are done."""
        cards = (self._cards[machine] for machine in self._bearing.machines)
        return max(
            max(card, processor) + answer
            for card, processor, answer in zip(cards, self._processors, self._answers, strict=True)
        )

    def _with(self, key: Key, server: int) -> tuple[float, float, float]:
        """A server's card, its processor, and its largest answer, if it held ``key`` too.

        Beyond what passes by comes what others push, less what no longer leaves the machine. A card that pushes cross
        too sends an answer while others come; that of a server of its own the last one when nothing comes any more.
        """
        bearing, kb = self._bearing, key.load_bytes / 1e3
        near, card_us = bearing.near[server], bearing.card_us[server]
        crosses_us = card_us * (1.0 - 2.0 * near) * kb if near < 1.0 else 0.0
        answer_us = 0.0 if near else card_us * kb
        card = self._cards[bearing.machines[server]] + crosses_us
        processor = self._processors[server] + bearing.processor_us[server] * key.raw_bytes / 1e3
        return card, processor, max(self._answers[server], answer_us)


def place(keys: Sequence[Key], bearing: Bearing, held: Iterable[Key]) -> list[int]:
    """A server for every key, beside those that are ``held``: the heaviest first, each to who is done first with it.

    Of servers of both kinds the better one alone is taken where both together would not save enough
    (:data:`~espresso.strategies.BOTH_MUST_SAVE`).
    """
    held = tuple(held)
    count = len(bearing.machines)
    if bearing.sharing is Sharing.SIZES:
        return _dealt(keys, bearing, held, range(count), _rule(bearing))[0]
    kinds = [[s for s in range(count) if (bearing.near[s] > 0.0) is beside] for beside in (True, False)]
    better = min((_dealt(keys, bearing, held, kind) for kind in kinds if kind), key=lambda found: found[1])
    if not all(kinds):
        return better[0]
    both = _dealt(keys, bearing, held, range(count))
    return (both if both[1] < (1.0 - BOTH_MUST_SAVE) * better[1] else better)[0]


def _dealt(
    keys: Sequence[Key], bearing: Bearing, held: Sequence[Key], servers: Sequence[int], shares: Sequence[float] = ()
) -> tuple[list[int], float]:
    """Keys dealt out to ``servers``, by shares if there are some; and when all are done, in microseconds."""
    load = _Load(bearing)
    for key in (*held, *keys):
        load.pass_by(key)
    for key in held:
        load.take(key, key.server)

    def done(key: Key, server: int) -> tuple[float, float]:
        return ((load.sizes[server] + key.raw_bytes) / shares[server], 0.0) if shares else load.after(key, server)

    found = [0] * len(keys)
    for index in sorted(range(len(keys)), key=lambda i: -keys[i].load_bytes):
        key = keys[index]
        found[index] = min(servers, key=partial(done, key))
        load.take(key, found[index])
    return _in_turn(keys, found), load.over_us


def _in_turn(keys: Sequence[Key], servers: Sequence[int]) -> list[int]:
    """The same number of keys of each size on every server, so spread that whoever pushes them in order keeps all busy.

    The heaviest are dealt first, to whoever bears most; a worker's first pushes would all go there.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        alike[key.workers, key.load_bytes, key.raw_bytes].append(index)
    found = list(servers)
    for indices in alike.values():
        counts = Counter(servers[index] for index in indices)
        turns = sorted(((turn + 0.5) / count, server) for server, count in counts.items() for turn in range(count))
        for index, (_, server) in zip(indices, turns, strict=True):
            found[index] = server
    return found


def _rule(bearing: Bearing) -> tuple[float, ...]:
    """BytePS's: the same for all of a kind."""
    beside = sum(near > 0.0 for near in bearing.near)
    # As many as workers run on: by the fullest of them, since not all need have a server, and by those that have.
    own = {machine for machine, near in zip(bearing.machines, bearing.near, strict=True) if near}
    machines = max(round(1 / max(bearing.near)), len(own)) if beside else 1
    colocated, dedicated = shares_by_rule(machines, beside, len(bearing.near) - beside)
    return tuple(max(colocated if near else dedicated, 1e-9) for near in bearing.near)


def balance(loads: Sequence[int], num_places: int, already: Sequence[int]) -> list[int]:
    """A place for every load: the heaviest first, each to the place with the fewest bytes so far.

    Args:
        loads: bytes of each.
        already: bytes that each place has.

    Example:
        >>> balance([4, 4, 2, 1, 1], 2, [0, 0])
        [0, 1, 0, 1, 1]
    """
    total = list(already)
    found = [0] * len(loads)
    for index in sorted(range(len(loads)), key=lambda i: -loads[i]):
        least = min(range(num_places), key=total.__getitem__)
        found[index] = least
        total[least] += loads[index]
    return found
