"""Which server holds which key: what each card and processor bears, and which of them has least to do so far."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from espresso.comm.parameter_server.wire import Key
from espresso.strategies import Sharing, shares_by_rule


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


@dataclass
class _Load:
    """What cards and processors have to do, in microseconds, and every server's gradients, uncompressed.

    Where all workers are on one machine, nothing crosses its card that its own servers hold.
    """

    bearing: Bearing
    cards: dict[int, float] = field(default_factory=dict)
    processors: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.bearing.machines)
        self.cards = dict.fromkeys(self.bearing.machines, 0.0)
        self.processors, self.sizes = [0.0] * count, [0.0] * count

    def pass_by(self, key: Key) -> None:
        """What a key's pushes and pulls take of the cards of machines that have both workers and servers."""
        done = set()
        for machine, near, us in zip(self.bearing.machines, self.bearing.near, self.bearing.card_us, strict=True):
            if machine not in done and near < 1.0:
                done.add(machine)
                self.cards[machine] += us * near * key.load_bytes / 1e3

    def after(self, key: Key, server: int) -> tuple[float, float]:
        """When a server would be done with ``key`` too; and its size so far.

        The busier of its card and its processor is, and then the answer is on its way back. A card that pushes of its
        own workers cross sends answers while others come; that of a server of its own, when nothing comes any more.
        """
        bearing = self.bearing
        card = self.cards[bearing.machines[server]] + self._card_us(key, server)
        processor = self.processors[server] + bearing.processor_us[server] * key.raw_bytes / 1e3
        answer = 0.0 if bearing.near[server] else self._card_us(key, server)
        return max(card, processor) + answer, self.sizes[server]

    def take(self, key: Key, server: int) -> None:
        """Have ``server`` hold ``key``."""
        self.cards[self.bearing.machines[server]] += self._card_us(key, server)
        self.processors[server] += self.bearing.processor_us[server] * key.raw_bytes / 1e3
        self.sizes[server] += key.raw_bytes

    def _card_us(self, key: Key, server: int) -> float:
        """Beyond what passes by: what comes from elsewhere, less what no longer leaves the machine."""
        near = self.bearing.near[server]
        beyond = 1.0 - 2.0 * near if near < 1.0 else 0.0
        return self.bearing.card_us[server] * beyond * key.load_bytes / 1e3


def place(keys: Sequence[Key], bearing: Bearing, held: Iterable[Key]) -> list[int]:
    """A server for every key, beside those that are ``held``: the heaviest first, each to who is done first with it."""
    held = tuple(held)
    load = _Load(bearing)
    for key in (*held, *keys):
        load.pass_by(key)
    for key in held:
        load.take(key, key.server)
    shares = _rule(bearing) if bearing.sharing is Sharing.SIZES else ()
    found = [0] * len(keys)
    for index in sorted(range(len(keys)), key=lambda i: -keys[i].load_bytes):
        key = keys[index]
        if shares:
            costs = [((size + key.raw_bytes) / part, 0.0) for size, part in zip(load.sizes, shares, strict=True)]
        else:
            costs = [load.after(key, server) for server in range(len(bearing.machines))]
        found[index] = min(range(len(costs)), key=costs.__getitem__)
        load.take(key, found[index])
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
