"""The certificate for a few giants: what their tasks lose by waiting for one another on the lanes.

The linear program knows every lane's load and every unit's chain, but not that units wait for each other from lane to
lane. Where two to six units hold nearly all bytes and are ready at about the same time, that is most of the gap. So all
combinations of their leaves are looked at, and of those that neither loads, weights nor budgets rule out, all orders
(:mod:`espresso.search.order_kernels`). Dominance plays no part there: a leaf that loads more may still wait less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from espresso.model.arrays import Reals, Wholes
from espresso.model.pricing import Pricer
from espresso.model.timeline_kernels import NUM_LANES
from espresso.search.bound_kernels import CHAIN, COSTS
from espresso.search.bounds import ROUNDING, Certificate, fees, prices
from espresso.search.candidates import Leaves, Unit, grouped, leaves_of
from espresso.search.order_kernels import Tasks, least_end
from espresso.search.relaxation import Relaxation, leaf_rows, leaf_tasks, leaves_with
from espresso.strategies import CompressorSpec

NEARLY_ALL = 0.9
"""Of all elements; with less the others' loads say more, and there is more to look at."""
EACH_LEAF = 150
"""Pairs of tasks that can be looked at while a leaf is priced, and again while its tasks are listed."""


@dataclass(frozen=True)
class _Giant:
    """What leaves of a giant cost, the most promising first.

    Attributes:
        leaf: int64[rows], among its leaves; of the program's rows, among these.
        loads: float64[rows, lanes].
        ends: float64[rows]: alone it ends no sooner.
        excess: float64[rows]: what one costs under the weights, less the cheapest that the certificate knows.
        spends: float64[rows, budgets].
    """

    leaf: Wholes
    loads: Reals
    ends: Reals
    excess: Reals
    spends: Reals

    def only(self, rows: npt.NDArray[np.bool_] | Wholes) -> _Giant:
        return _Giant(self.leaf[rows], self.loads[rows], self.ends[rows], self.excess[rows], self.spends[rows])


class Orders:
    """Bounds from orders at one partition size; what all of them need is found once."""

    def __init__(
        self,
        relaxation: Relaxation,
        certificate: Certificate,
        units: Sequence[Unit],
        leaves: Leaves,
        partition_bytes: int,
        pricer: Pricer,
    ) -> None:
        self._relaxation, self._partition_bytes, self._pricer = relaxation, partition_bytes, pricer
        self._units = [units[giant] for giant in relaxation.giants]
        self._leaves = [leaves_of(leaves, unit) for unit in self._units]
        self._limits = relaxation.limits * (1 + ROUNDING)
        self._alike = list(grouped(self._units).values())  # of one size: their leaves cost the same
        self._priced: dict[tuple[int, frozenset[CompressorSpec] | None], tuple[Reals, Wholes, Wholes]] = {}
        # Weights say something of a giant's leaves only if the bound comes from them.
        self._weighed = certificate.makespan_us > relaxation.backward_us
        self._root = certificate.makespan_us if self._weighed else 0.0
        self._paid, self._fees = prices(relaxation, certificate.weights), fees(relaxation, certificate.paid)

    def bound(self, above: float, limit: int) -> tuple[float, int]:
        """A bound, at most ``above``, and what it took, in pairs of tasks; -inf if that would be beyond ``limit``."""
        known = self._possible(self._undominated, above)
        if not known:
            return above * (1.0 - ROUNDING), 0  # no strategy is below it
        asked = [(places, self._compressors(places, known)) for places in self._alike]
        fresh = {(places[0], specs): self._of(places[0], specs) for places, specs in asked}
        fresh = {key: leaf for key, leaf in fresh.items() if key not in self._priced}
        to_price = EACH_LEAF * sum(map(len, fresh.values()))
        if to_price > limit:
            return -np.inf, 0
        self._priced |= {(place, specs): self._price(place, leaf) for (place, specs), leaf in fresh.items()}
        every = {
            place: self._giant(place, *self._priced[places[0], specs]) for places, specs in asked for place in places
        }
        found = self._possible([every[place] for place in range(len(every))], above)
        if not found:
            return above * (1.0 - ROUNDING), to_price
        spent = to_price + EACH_LEAF * sum(len(one.leaf) for one in found)
        if spent > limit:
            return -np.inf, to_price
        program, last = self._relaxation, np.cumsum([len(one.leaf) for one in found])
        end, looked_at = least_end(
            np.append(0, last[:-1]), last, np.argsort([unit.numel for unit in self._units])[::-1].copy(),
            program.release_us[program.giants], program.backward_us,
            np.concatenate([one.loads for one in found]), np.concatenate([one.excess for one in found]), self._root,
            np.concatenate([one.spends for one in found]), self._limits,
            _joined([
                leaf_tasks(self._pricer, unit.size, leaves, self._partition_bytes, one.leaf)
                for unit, leaves, one in zip(self._units, self._leaves, found, strict=True)
            ]),
            above, limit - spent,
        )  # fmt: skip
        return float(end) * (1.0 - ROUNDING), spent + int(looked_at)

    @cached_property
    def _undominated(self) -> list[_Giant]:
        """The program's rows: where none of them is possible, none is that they dominate."""
        return [self._giant(place, *self._rows_of(place)) for place in range(len(self._units))]

    def _compressors(self, places: Sequence[int], known: Sequence[_Giant]) -> frozenset[CompressorSpec] | None:
        """Of those leaves that these rows may dominate: within budgets of the same compressors, else of any (None)."""
        program = self._relaxation
        if not program.has_budget:
            return None
        starts = program.first[program.giants]
        rows = {row for place in places for row in (starts[place] + known[place].leaf).tolist()}
        return frozenset(program.origin[row].compressor for row in rows)

    def _of(self, place: int, specs: frozenset[CompressorSpec] | None) -> Wholes:
        leaves = self._leaves[place]
        return np.arange(len(leaves)) if specs is None else leaves_with(self._pricer, leaves, specs)

    def _price(self, place: int, leaf: Wholes) -> tuple[Reals, Wholes, Wholes]:
        """Rows of these leaves, their kinds, and which they are."""
        ledger, leaves = self._relaxation.ledger, self._leaves[place]
        rows = leaf_rows(self._pricer, self._units[place].size, leaves, self._partition_bytes, leaf)
        return rows, np.zeros(len(leaf), dtype=np.int64) if ledger is None else ledger.of_leaves(leaves)[leaf], leaf

    def _rows_of(self, place: int) -> tuple[Reals, Wholes]:
        """A giant's rows of the program, and their kinds."""
        program, giant = self._relaxation, self._relaxation.giants[place]
        span = slice(program.first[giant], program.last[giant])
        return program.rows[span], program.kind_of[span]

    def _giant(self, place: int, rows: Reals, kinds: Wholes, leaf: Wholes | None = None) -> _Giant:
        program, giant = self._relaxation, self._relaxation.giants[place]
        costs, known = (
            some[:, :COSTS] @ self._paid[giant] + self._fees[giant, of]
            for some, of in ((rows, kinds), self._rows_of(place))
        )
        excess = (costs - known.min()) * self._weighed
        ends = np.maximum(program.release_us[giant] + rows[:, CHAIN], program.backward_us + rows[:, 0])
        spends = np.ascontiguousarray(program.spends[:, giant, kinds].T)
        whole = _Giant(np.arange(len(rows)) if leaf is None else leaf, rows[:, :NUM_LANES], ends, excess, spends)
        return whole.only(np.argsort(excess, kind="stable"))

    def _possible(self, giants: Sequence[_Giant], above: float) -> list[_Giant]:
        """The giants with those leaves that a strategy below ``above`` can have; none where there is no such."""
        program = self._relaxation
        begins = program.release_us[program.giants, None] + np.zeros(NUM_LANES)
        begins[:, 0] = program.backward_us
        found = [one.only((one.ends < above) & (self._root + one.excess < above)) for one in giants]
        for place in range(len(found)):
            if not all(len(one.leaf) for one in found):
                return []
            one = found[place]
            others = np.array([other.loads.min(axis=0) for other in found])
            others[place] = 0.0
            # A lane serves what is released from any giant on: of this one this leaf's load, of the others their least.
            after = begins + others[::-1].cumsum(axis=0)[::-1]
            fits = (np.maximum(after[: place + 1].max(axis=0) + one.loads, after.max(axis=0)) < above).all(axis=1)
            spent = sum(other.spends.min(axis=0) for other in found) - one.spends.min(axis=0)
            fits &= (one.spends + spent <= self._limits).all(axis=1)
            found[place] = one.only(fits)
        return found if all(len(one.leaf) for one in found) else []


def say_more(relaxation: Relaxation, units: Sequence[Unit], pricer: Pricer) -> bool:
    """Whether orders can: of two giants or more that hold nearly all, under the papers' contention."""
    held = sum(units[unit].numel for unit in relaxation.giants)
    nearly_all = held >= NEARLY_ALL * sum(unit.numel for unit in units)
    return len(relaxation.giants) > 1 and nearly_all and pricer.costs.in_turn(pricer.cluster)


def _joined(blocks: Sequence[Tasks]) -> Tasks:
    """The tasks of several units' leaves, one unit after the other."""
    longest = max(sets.shape[1] for sets, *_ in blocks)
    wide = [[np.pad(one, ((0, 0), (0, longest - one.shape[1]))) for one in block[:3]] for block in blocks]
    sets, whole, last = (np.concatenate(columns) for columns in zip(*wide, strict=True))
    return sets, whole, last, np.concatenate([sizes for *_, sizes in blocks])
