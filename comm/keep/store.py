"""Residuals: what was not sent, kept so that nothing is lost.

A residual is addressed by (tensor, element range, site). Compression sites read one buffer and write
another; after the iteration every rank commits (swaps) or discards, together.

When the plan changes, whatever finds no place of its own in the new one moves to the tensor's local site, or
is *carried* if there is none: added to this rank's own gradient in the next iteration. Residuals are in
units of the sum over ranks, so adding what an aggregator kept to its own contribution changes the sum by
exactly that much, whoever it was: no exchange is needed. Of a residual that several ranks hold (the last
intra step encodes the same aggregate on every node) only the first replica carries.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from espresso.comm.keep.residual import FULL, Loan, Places, Residual, check_storage
from espresso.comm.memory import HOST, Memory
from espresso.compressors.base import Correction
from espresso.strategies import Bucket, Run, Site

logger = logging.getLogger("espresso")

Array = npt.NDArray[Any]

_ALIGN = 16
"""Elements: 64 bytes of float32."""


Address = tuple[str, Site]
"""(tensor name, site)."""

Piece = tuple[int, Array, int]
"""(first element within the tensor, values, replica number: only replica 0 carries)."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive numbers of a tensor that are kept, as they were when they were lent.

    Attributes:
        site: None for what is carried.
        start: the first element within the tensor.
        at: where they begin in the loan.
    """

    tensor: str
    site: Site | None
    start: int
    numel: int
    replica: int
    loan: Loan
    at: int = 0

    def read(self) -> Array:
        """A copy of the numbers."""
        return self.loan.read(self.at, self.numel)

    def cut(self, low: int, high: int) -> Stretch:
        """From its element ``low`` to before ``high``."""
        return replace(self, start=self.start + low, at=self.at + low, numel=high - low)


Fetched = Callable[[Callable[[], list[torch.Tensor]]], list[torch.Tensor]]
"""Makes tensors, and gives them on the host."""


def _as_they_are(make: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    return make()


class Remote(Protocol):
    """Residuals that parameter servers keep: this rank saves and loads a share of them (``Site.SERVER``)."""

    def snapshot(self) -> dict[Address, list[Piece]]: ...

    def reset(self) -> None: ...

    def load(self, pieces: Mapping[Address, Sequence[Piece]], numels: Mapping[str, int]) -> None: ...

    def rescale(self, factors: Mapping[str, float]) -> None: ...


class ResidualStore:
    """All residuals of this rank: those in use by the plan, and those carried over from an earlier one.

    Args:
        transactional: keep what was kept before an iteration until it counts.
        storage: how residuals are kept between iterations, where their compressors do not say it.
        gain: the part of what was not sent that the next iteration adds; None leaves it to each compressor.

    Attributes:
        live: those in use by the plan.
        waits: whether what is owed of a stretch without any gradient is kept until it has some: its average may be
            dropped, as by DDP of a parameter that no rank used. On the host.
        silent: tensors of which this rank has nothing to give in this iteration, whatever is left over of earlier ones.
        unsent: tensors of whose carry some was not in the last iteration that counted.
    """

    def __init__(self, *, transactional: bool = True, storage: str = FULL, gain: float | None = None) -> None:
        self.transactional = transactional
        self.gain = gain
        self.storage = check_storage(storage)
        self._reported = 0
        self.waits = False
        self.silent: set[str] = set()
        self.remote: Remote | None = None
        self.live: list[Residual] = []
        self.carry: dict[str, Array] = {}
        self.unsent: set[str] = set()
        self._used: list[tuple[str, int, int, Array | None]] = []
        self._waiting: dict[Address, list[Piece]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all residual buffers, both of each pair."""
        return sum(r.num_bytes for r in self.live) + sum(a.nbytes for a in self.carry.values())

    def norm(self) -> float:
        """Euclidean norm of everything this rank keeps."""
        squares = [r.square_sum() for r in self.live]
        squares += [HOST.square_sum(values) for values in self.carry.values()]
        return float(np.sqrt(sum(squares)))

    def new_residual(
        self,
        site: Site,
        runs: Sequence[Run],
        dtype: Any,
        replica: int,
        memory: Memory = HOST,
        *,
        gain: float = 1.0,
        storage: str = "",
        holds: bool = False,
    ) -> Residual:
        """A zero residual over these runs, with the compressor's own ``gain`` unless the store has one, and kept as the
        compressor says, if it does; it counts once ``adopt`` has been given it. ``holds`` is :class:`Residual`'s.

        Every run begins on a cache line, whatever its place in the bucket: encoders write residuals past
        the cache, which takes aligned addresses.
        """
        gain = gain if self.gain is None else self.gain
        lengths = [-(-run.numel // _ALIGN) * _ALIGN for run in runs]
        starts = tuple(accumulate(lengths, initial=0))[: len(runs)]
        return Residual(
            site, tuple(runs), starts, dtype, replica, memory,
            transactional=self.transactional, gain=gain, storage=storage or self.storage, holds=holds,
        )  # fmt: skip

    def kept(
        self, where: Mapping[str, Places], fetched: Fetched = _as_they_are, weigh: Callable[[Site], float] | None = None
    ) -> dict[str, Array]:
        """What this rank answers for of some elements of tensors: its residuals at all sites and what it carries. Only
        between iterations. Those at servers are not in it.

        Args:
            where: elements within the tensor, ascending.
            fetched: makes tensors and brings them to the host, all at once.
            weigh: what is kept at a site counts so much in a second row.

        Returns:
            By tensor, float64[elements], or float64[2, elements] with ``weigh``.
        """
        found = {tensor: np.zeros((1 if weigh is None else 2, places.size)) for tensor, places in where.items()}

        def add(tensor: str, here: slice, values: Array, site: Site) -> None:
            found[tensor][0, here] += values
            if weigh is not None:
                found[tensor][1, here] += weigh(site) * values

        def within(tensor: str, start: int, numel: int) -> slice:
            return slice(*np.searchsorted(where[tensor], (start, start + numel)))

        pieces = []
        for residual, run, at in _stretches(self.live):
            if residual.replica == 0 and run.tensor in where:
                here = within(run.tensor, run.tensor_start, run.numel)
                pieces.append((residual, run.tensor, here, where[run.tensor][here] + (at - run.tensor_start)))

        def picked() -> list[torch.Tensor]:
            # One residual after another: what is unpacked of them all is as large as the gradients.
            return [part for residual, mine in groupby(pieces, key=itemgetter(0))
                    for part in residual.picked([at for *_, at in mine])]  # fmt: skip

        for (residual, tensor, here, _), kept in zip(pieces, fetched(picked) if pieces else (), strict=True):
            values = kept.numpy()
            values = values if residual.gain == 1 else values / values.dtype.type(residual.gain)
            add(tensor, here, values, residual.site)
        arrays = [(tensor, 0, values, Site.LOCAL) for tensor, values in self.carry.items()]
        for (tensor, site), parts in self._waiting.items():
            arrays += [(tensor, start, values, site) for start, values, replica in parts if replica == 0]
        for tensor, start, held, site in arrays:
            if tensor in where:
                here = within(tensor, start, held.size)
                add(tensor, here, held[where[tensor][here] - start], site)
        return found if weigh is not None else {tensor: rows[0] for tensor, rows in found.items()}

    def holds(self, residuals: Iterable[Residual]) -> bool:
        """Whether all of these are in use."""
        live = set(map(id, self.live))
        return all(id(residual) in live for residual in residuals)

    def adopt(
        self, residuals: Iterable[Residual], numels: Mapping[str, int], *, only: Collection[str] | None = None
    ) -> None:
        """Make these the residuals in use; move over what the old ones hold, carry the rest.

        Args:
            residuals: of the new plan, made by ``new_residual``.
            numels: elements of every tensor that was seen, for the arrays that carry; what was loaded of others waits.
            only: replace just the residuals that touch these tensors (one bucket of a changing structure).
        """
        replaced = [r for r in self.live if only is None or any(run.tensor in only for run in r.runs)]
        gone = set(map(id, replaced))
        fresh = list(residuals)
        heirs = _heirs(replaced, fresh)
        # At no time are there buffers of both plans: a job whose memory is nearly full would not survive a switch.
        pieces = self._taken_from(r for r in replaced if id(r) not in heirs)
        self.live = [r for r in self.live if id(r) not in gone]
        for residual in replaced:
            if id(residual) in heirs:
                heirs[id(residual)].inherit(residual)
        self.live += heirs.values()
        inherited = set(map(id, heirs.values()))
        begun = [residual for residual in fresh if id(residual) not in inherited]
        try:
            for residual in begun:
                residual.begin()
        except BaseException:  # no memory: what was kept can still be saved
            for address, parts in pieces.items():
                self._waiting.setdefault(address, []).extend(parts)
            raise
        self.live += begun
        ours = numels if only is None else only
        waiting = {t: self.carry.pop(t) for t in list(self.carry) if t in ours}
        for address, parts in self._claim(ours).items():
            pieces.setdefault(address, []).extend(parts)
        for tensor, values in waiting.items():
            pieces.setdefault((tensor, Site.LOCAL), []).append((0, values, 0))
        self._place(pieces, numels, fresh)
        self._report()

    def _report(self) -> None:
        """Log what residuals take, before the first of them is used."""
        if self.num_bytes != self._reported:
            self._reported = self.num_bytes
            logger.info(
                "residuals take %.2f MiB on this rank (%s, %s)", self._reported / 2**20,
                " and ".join(sorted({residual.storage for residual in self.live}) or [self.storage]),
                "both buffers of each" if self.transactional else "one buffer each",
            )  # fmt: skip

    def _taken_from(self, residuals: Iterable[Residual]) -> dict[Address, list[Piece]]:
        """Copies of what these hold; their buffers are gone then."""
        pieces: dict[Address, list[Piece]] = {}
        for residual in residuals:
            kept = residual.read(0, residual.size)  # once: of packed numbers all are unpacked for it
            for _, run, at in _stretches([residual]):
                piece = (run.tensor_start, kept[at : at + run.numel], residual.replica)
                pieces.setdefault((run.tensor, residual.site), []).append(piece)
            residual.end()
        return pieces

    def add_carry(self, tensor: str, start: int, values: Array, numel: int) -> None:
        """Have ``values`` added to this rank's gradient of ``tensor`` next time."""
        if not np.any(values):
            return
        held = self.carry.get(tensor)
        if held is None:
            held = self.carry[tensor] = np.zeros(numel, values.dtype)
        held[start : start + values.size] += values

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiply everything kept of the named tensors; for when the units of a gradient change (a loss weight,
        a learning rate). Only between iterations."""
        for residual in self.live:
            if any(run.tensor in factors for run in residual.runs):
                residual.scale(factors)
        for tensor in self.carry.keys() & factors.keys():
            self.carry[tensor] *= factors[tensor]
        for (tensor, _), parts in self._waiting.items():
            if tensor in factors:  # not in place: the arrays may be lent
                parts[:] = [(start, values * factors[tensor], replica) for start, values, replica in parts]
        if self.remote is not None:
            self.remote.rescale(factors)

    def lend(self) -> list[Stretch]:
        """All residuals, those waiting for a plan and the servers' included, and what is carried, as they are now.

        Nothing that is in use on the host is copied.
        """
        found = []
        for residual in self.live:
            loan = residual.lend()
            for _, run, at in _stretches([residual]):
                stretch = Stretch(run.tensor, residual.site, run.tensor_start, run.numel, residual.replica, loan, at)
                found.append(stretch)
        for kept in (self._waiting, {} if self.remote is None else self.remote.snapshot()):
            for (tensor, site), parts in kept.items():
                found += [Stretch(tensor, site, start, v.size, replica, Loan(v)) for start, v, replica in parts]
        found += [Stretch(tensor, None, 0, v.size, 0, Loan(v.copy())) for tensor, v in self.carry.items()]
        return found

    def load(
        self, pieces: Mapping[Address, Sequence[Piece]], carry: Mapping[str, Array], numels: Mapping[str, int]
    ) -> None:
        """Replace everything. Pieces wait until a plan that keeps their tensor is adopted."""
        self.carry = {tensor: values.copy() for tensor, values in carry.items()}
        self._used.clear()
        if self.remote is not None:
            self.remote.load({a: p for a, p in pieces.items() if a[1] is Site.SERVER}, numels)
            pieces = {a: p for a, p in pieces.items() if a[1] is not Site.SERVER}
        self._waiting = {address: list(parts) for address, parts in pieces.items()}
        for residual in self.live:
            residual.clear()
        live = {run.tensor for residual in self.live for run in residual.runs}
        self._place(self._claim(live), numels, self.live)

    def _claim(self, tensors: Collection[str]) -> dict[Address, list[Piece]]:
        """Take the loaded pieces of these tensors out of waiting."""
        claimed = {a: p for a, p in self._waiting.items() if a[0] in tensors}
        for address in claimed:
            del self._waiting[address]
        return claimed

    def hears(self, tensors: set[str], silent: set[str]) -> None:
        """Of these tensors, which all come now, some got no gradient."""
        self.silent -= tensors
        self.silent |= silent

    def used_carry(self, tensor: str, start: int, numel: int, left: Array | None = None) -> None:
        """A stretch of the carry of ``tensor`` went into this iteration; a commit keeps only what is ``left`` of it.

        Lanes call this at the same time, for different stretches.
        """
        self._used.append((tensor, start, numel, left))

    def commit(self) -> None:
        """The iteration counts: what was written becomes what is kept."""
        for residual in self.live:
            residual.commit()
        for tensor, start, numel, _ in self._used:
            self.carry[tensor][start : start + numel] = 0
        if self.waits:
            self.unsent = {tensor for tensor, values in self.carry.items() if values.any()}
        for tensor, start, numel, left in self._used:
            if left is not None:
                self.carry[tensor][start : start + numel] = left
        for tensor in {tensor for tensor, *_ in self._used}:
            if not self.carry[tensor].any():
                del self.carry[tensor]
        self._used.clear()

    def discard(self) -> None:
        """The iteration did not happen (a non-finite gradient somewhere): keep what was kept before it."""
        for residual in self.live:
            residual.discard()
        self._used.clear()

    def place(self, tensor: str, site: Site, piece: Piece) -> None:
        """Add a piece to the residuals in use that keep (tensor, site); carry what lies outside."""
        self._place({(tensor, site): [piece]}, {tensor: piece[0] + piece[1].size}, self.live)

    def _place(
        self, pieces: Mapping[Address, Sequence[Piece]], numels: Mapping[str, int], targets: Sequence[Residual]
    ) -> None:
        """Put pieces where the plan keeps their (tensor, site); what lies outside moves on, once per replica.

        It goes to the tensor's local site, which encodes this rank's own contribution, or else is carried.
        """
        stretches = list(_stretches(targets))
        added: dict[int, tuple[Residual, list[tuple[int, Array]]]] = {}
        for (tensor, site), parts in pieces.items():
            for start, values, replica in parts:
                left = [(start, start + values.size)]
                for where in (site, Site.LOCAL) if replica == 0 else (site,):
                    for residual, run, at in stretches:
                        if residual.site is not where or run.tensor != tensor:
                            continue
                        kept, left = _cut(left, run.tensor_start, run.tensor_start + run.numel)
                        for low, high in kept:
                            part = values[low - start : high - start].astype(residual.dtype, copy=False)
                            mine = added.setdefault(id(residual), (residual, []))[1]
                            mine.append((at + low - run.tensor_start, part))
                for low, high in left if replica == 0 else ():
                    self.add_carry(tensor, low, values[low - start : high - start], numels[tensor])
        for residual, every in added.values():  # at once: packed numbers are all unpacked for it
            residual.add(every)


def _heirs(old: Sequence[Residual], fresh: Sequence[Residual]) -> dict[int, Residual]:
    """Of residuals that go, by identity, the new ones that keep the same numbers in the same way."""
    places = {residual.place: residual for residual in fresh}
    return {id(residual): places.pop(residual.place) for residual in old if residual.place in places}


def _cut(
    ranges: Sequence[tuple[int, int]], start: int, stop: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The parts of ranges that lie within one from ``start`` to before ``stop``, and the others."""
    within: list[tuple[int, int]] = []
    others: list[tuple[int, int]] = []
    for low, high in ranges:
        pieces = ((low, min(high, start)), (max(low, start), min(high, stop)), (max(low, stop), high))
        for place, (first, last) in enumerate(pieces):
            if first < last:
                (within if place == 1 else others).append((first, last))
    return within, others


def _stretches(residuals: Iterable[Residual]) -> Iterator[tuple[Residual, Run, int]]:
    """Every stretch of a tensor that they keep, and where it begins in the residual's buffers."""
    for residual in residuals:
        for run, at in zip(residual.runs, residual.starts, strict=True):
            yield residual, run, at


class Velocities(ResidualStore):
    """All velocities of this rank, and the rule that moves them: kept, moved, saved and discarded as residuals are.

    A velocity sits at the first compression site of its tensor, or at ``Site.LOCAL`` where the tensor is raw. All of
    them are sums over ranks of what one rank alone would keep, so a change of plan moves them like residuals: what
    finds no place of its own is carried and enters through this rank's own gradient.
    """

    def __init__(self, rule: Correction, *, transactional: bool = True) -> None:
        super().__init__(transactional=transactional)
        self.rule = rule

    def clip(
        self, bucket: Bucket, buffer: torch.Tensor, num_ranks: int, grad_scale: float, memory: Memory = HOST
    ) -> None:
        """Scale every tensor of a bucket down to the rule's norm, in place; no copy.

        A norm that is not finite leaves its tensor alone: the step will be skipped.
        """
        if not self.rule.clip_norm:
            return
        limit = self.rule.clip_norm / math.sqrt(num_ranks) * grad_scale
        memory.clip([buffer[slot.offset : slot.offset + slot.numel] for slot in bucket.slots], limit)


class FactorStore:
    """What compressors of several rounds keep between steps: PowerSGD's Q, by tensor, equal on all ranks.

    Committed like residuals. Lanes write at the same time, for different tensors, arrays of the memory they run in.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}
        self._written: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self._kept.values())

    def read(self, tensor: str) -> Any | None:
        """What the last step that counted left."""
        return self._kept.get(tensor)

    def write(self, tensor: str, values: Any) -> None:
        """For the next step, if this one counts."""
        self._written[tensor] = values

    def commit(self) -> None:
        """The iteration counts."""
        self._kept.update(self._written)
        self._written.clear()

    def discard(self) -> None:
        """The iteration did not happen."""
        self._written.clear()

    def snapshot(self) -> dict[str, Any]:
        """Copies of everything on the host, flat."""
        # In one order on all ranks: which matrix was written first is of no matter, and differs.
        return {tensor: HOST.here(values).reshape(-1).copy() for tensor, values in sorted(self._kept.items())}

    def load(self, factors: dict[str, Any]) -> None:
        """Replace everything."""
        self._kept = dict(factors)
        self._written.clear()
