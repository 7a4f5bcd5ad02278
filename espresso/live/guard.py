"""Is what is learnt from what the ranks computed? A sample of every compressed tensor, compared with the exact sum.

Within ``EVERY`` steps, for some runs of each compressed tensor (others each time)::

    before the exchange   g = this rank's gradient,  e = what it keeps          sketches: 8 numbers each
                          (with momentum correction g is what that makes of the gradient and the velocity)
    after it              a = the average,           e' = what it keeps
    two steps later       the sketches of all ranks are added up: 67 numbers a tensor travel, nobody waits for them

A *sketch* adds the numbers up in 8 groups with random signs: it is linear, and its norm estimates theirs. Two
figures of a tensor come from it:

* ``deviation``: how far the average of this one step is from the exact one, |N a - sum g| / |sum g|. Error feedback
  sends the rest later, so this may be above 1 and all is well.
* ``lost``: what was neither sent nor kept, |N a - sum (g + e - e')| / |sum g|. Error feedback loses nothing, at any
  site, whatever the compressor: beyond rounding this is 0, so it needs no baseline, and a sound run raises no alarm.
  An encoder that zeroes, halves or repeats what it sends shows at once, on however few of the ranks.

All are judged by sums over the ranks, so that all find the same. Where their averages of a tensor differ a decoder lies
on one of them, and the tensor is out too.

A tensor that is out in ``CONFIRMED`` of the checks one after another is named, with its group, and goes exact.

What a rank *owes*, as a budget counts it (:mod:`espresso.search.error_budget`), is seen by the way: sketches of e' with
weights that cancel what all ranks keep alike, of 32 numbers, since how large they are is what is asked.

Not seen: an encoder that sends little and keeps all the rest. Nothing is lost then; ``residual_ratio`` (what is kept
over the gradient) grows, and a tensor of which nothing at all is sent is named too, except by sparsifiers. Nor what
unbiased quantizers lose (``qsgd``, ``terngrad``): they keep nothing, and one step says nothing of their mean.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from espresso.comm.execute.assignment import Assignment, Record
from espresso.comm.execute.iteration import Side
from espresso.comm.groups import Groups
from espresso.comm.keep.residual import FULL, Places
from espresso.comm.keep.store import ResidualStore, Velocities
from espresso.comm.member import Gathering
from espresso.compressors import create
from espresso.compressors.base import Traits
from espresso.cpu_offload.sketches import sketch
from espresso.search.error_budget import rings
from espresso.strategies import Bucket, Choice, Cluster, CompressorSpec, Site, TensorSpec

Array = npt.NDArray[Any]

EVERY, APART = 64, 16
"""Steps in which every compressed tensor is looked at once, and from one check to the next at least, which it is until
what a strategy owes is known."""

AGAIN = 2
"""Steps until the next check after one that found something."""

CONFIRMED = 2
"""So many checks in a row must find a tensor out."""

LAG = 1
"""Steps until the sums of a check are looked at."""

MOST, RUN = 1 << 18, 64
"""Elements that one check looks at: half of them in equal parts, half by tensors' sizes, of a larger one in runs."""

MOST_TENSORS = 64
"""Looked at in one check; of more, others in the next, which comes the sooner."""

SIZE, OWN_SIZE = 8, 32
"""Numbers of a sketch, and of the one that says what is owed."""

BAND, CAST_BAND = 0.02, 0.15
"""``lost`` above this is out: of compressors with error feedback, whose only loss is rounding, and of casts."""

FLOAT32_EPS = 2.0**-23
ROUNDED = 4
"""Roundings of what is owed in a step for which ``lost`` has room: where gradients vanish, once all is learnt by heart,
they are what is left."""

ROUNDING = {FULL: 0.0, "bf16": 2.0**-6, "int8": 2.0**-3}
"""Residuals kept narrowly lose up to this part of themselves in a step."""

NOTHING = 1e-6
"""A tensor sends nothing if its part of what is owed is below this."""

MOST_GROUPS = 16

OWED_CHECKS = 8
"""The latest of a tensor that say what it owes: each looks at other runs."""

_WIDTH = 4 * SIZE + OWN_SIZE + 3


def group_names(tensors: Sequence[str]) -> dict[str, str]:
    """The group of each tensor: its module, as deep as there are no more than ``MOST_GROUPS`` of them.

    >>> group_names(["net.0.weight", "net.0.bias", "head"])
    {'net.0.weight': 'net.0', 'net.0.bias': 'net.0', 'head': 'head'}
    """
    deepest = max((name.count(".") for name in tensors), default=0)
    for depth in range(deepest, 0, -1):
        found = {name: ".".join(name.split(".")[:-1][:depth]) or name for name in tensors}
        if len(set(found.values())) <= MOST_GROUPS:
            return found
    return {name: name if len(tensors) <= MOST_GROUPS else name.split(".")[0] for name in tensors}


@dataclass(frozen=True)
class Alarm:
    """A group of tensors whose average is not what it should be."""

    group: str
    tensors: tuple[str, ...]
    reason: str


@dataclass
class _Check:
    """One iteration that is looked at.

    Attributes:
        where: by tensor, which elements.
        signs: of its sketches.
        kept: by tensor, a sketch of the residuals before the exchange.
        moving: by tensor, the velocities before it, where momentum is corrected.
        gain_scale: of the strategy that it runs.
        in_use: whether it runs what is not only tried.
        given: by tensor, the gradients before it.
        buffers: the bucket's buffer, where their averages will be, and where in it.
        averages: on a GPU, copies of those once they are there.
        of_bucket: which tensors are in a bucket.
        eps: float64, by tensor, of its gradients' type.
    """

    iteration: int
    where: dict[str, Places]
    signs: Array
    choices: dict[str, Choice]
    kept: dict[str, Array]
    moving: dict[str, Array]
    scale: float = 1.0
    gain_scale: float = 1.0
    in_use: bool = True
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    averages: dict[str, torch.Tensor] = field(default_factory=dict)
    of_bucket: dict[int, list[str]] = field(default_factory=dict)
    eps: Array = field(default_factory=lambda: np.zeros(0))


class Guard:
    """Looks at an iteration now and then. All ranks make the same calls.

    Args:
        tensors: of the model that are here; of shards, what is here of them.
        names: of all tensors of the model, alike on all shards.
        store: what is kept.
        side: where gradients are.
        velocities: in front of it, where the job corrects momentum; of a rule that does not clip.

    Attributes:
        figures: of each group that is compressed, by name: ``deviation``, ``residual_ratio``, ``lost``, of its latest
            check.
    """

    def __init__(
        self,
        groups: Groups,
        tensors: Sequence[TensorSpec],
        names: Sequence[str],
        store: ResidualStore,
        side: Side,
        velocities: Velocities | None = None,
    ) -> None:
        self._groups, self._store, self._side, self._velocities = groups, store, side, velocities
        side.averaged = self._averaged
        self._numels = {tensor.name: tensor.numel for tensor in tensors}
        self._group_of = group_names(names)
        self._signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0], np.float32), 2 * MOST)
        for dtype in (np.float32, np.float64):  # compiled, or read from disk
            _sketch(np.zeros(1, dtype), self._signs)
        self._next = 1
        self._turn, self._apart = 0, EVERY
        self._weigh = _weights(groups.rank, groups.cluster)
        self._check: _Check | None = None
        self._summing: tuple[_Check, Gathering] | None = None
        self._out: dict[str, int] = {}
        self._owed: dict[str, tuple[tuple[Choice, float], deque[tuple[float, float]]]] = {}
        self._looked_at: tuple[tuple[Mapping[str, Choice], float], int] = ({}, 1.0), 0  # in use, in how many checks
        self.figures: dict[str, dict[str, float]] = {}

    # -- around an iteration -------------------------------------------------------------------------

    def restart(self, iteration: int) -> None:
        """Go on from a checkpoint: look at its next iteration but one."""
        self._next, self._check, self._summing, self._out = iteration + 1, None, None, {}
        self._owed.clear()
        self._looked_at = ({}, 1.0), 0

    def begin(
        self, iteration: int, assignment: Assignment, scale: Callable[[], float | None], *, in_use: bool = True
    ) -> None:
        """An iteration begins; nothing is under way.

        Args:
            in_use: whether what it runs is not only tried, so that what it owes counts, and what is exact loses its
                figures.
        """
        self._check = None
        if iteration < self._next or self._summing is not None or assignment.deferred:
            return
        choices = assignment.strategy.known  # of all shards, which keep in step
        names = sorted(name for name, choice in choices.items() if _is_seen(choice))
        if in_use:
            seen = {self._group_of[name] for name in names}
            self.figures = {group: row for group, row in self.figures.items() if group in seen}
        if not names:
            return
        checks, least = math.ceil(len(names) / MOST_TENSORS), min(APART, EVERY)
        in_force = choices, assignment.strategy.gain_scale
        if in_use and self._looked_at[0] != in_force:
            self._looked_at = in_force, 0
        is_known = not in_use or self._looked_at[1] >= OWED_CHECKS * checks
        self._apart = max(EVERY // checks, least) if is_known else least
        first = (self._turn * MOST_TENSORS) % len(names)
        names = [name for name in (names[first:] + names[:first])[:MOST_TENSORS] if self._numels.get(name)]
        draws = np.random.default_rng(iteration)  # other ones in each check: what is kept is much alike in them
        where = _places({name: self._numels[name] for name in names}, draws)
        signs = self._signs[draws.integers(MOST) :]
        kept = self._store.kept(where, self._side.fetched)
        self._check = _Check(
            iteration,
            where,
            signs,
            {name: choices[name] for name in names},
            {name: _sketch(values, signs)[:-1] for name, values in kept.items()},
            {} if self._velocities is None else self._velocities.kept(where, self._side.fetched),
            scale() or 1.0,
            assignment.strategy.gain_scale,
            in_use,
        )

    def see(self, buffer: torch.Tensor, describe: Callable[[], Bucket]) -> Bucket:
        """A bucket is about to be exchanged; what it holds."""
        bucket, check = describe(), self._check
        if check is None:
            return bucket
        for slot in bucket.slots:
            if slot.tensor in check.where:
                places = torch.from_numpy(check.where[slot.tensor] + slot.offset)
                at = places.to(buffer.device, non_blocking=True)  # backward is not waited for
                if self._store.waits and slot.tensor in self._store.silent and bool(buffer[at].any()):
                    continue  # left over from an earlier step: it is not kept, and DDP drops its average
                check.buffers[slot.tensor] = buffer.detach(), at
                check.given[slot.tensor] = self._side.copied(buffer.detach().index_select(0, at))
                check.of_bucket.setdefault(bucket.index, []).append(slot.tensor)
        return bucket

    def _averaged(self, bucket: int) -> bool:
        """Keep what will be gone; whether there is something to keep."""
        check = self._check
        if check is None or bucket not in check.of_bucket:
            return False
        for name in check.of_bucket[bucket]:
            buffer, at = check.buffers[name]
            check.averages[name] = self._side.copied(buffer.index_select(0, at))
        return True

    def end(self, record: Record) -> bool:
        """The iteration is averaged and judged. Whether all ranks should call :meth:`look` in this hook call."""
        check, self._check = self._check, None
        if self._summing is not None:
            return record.iteration >= self._summing[0].iteration + LAG
        if check is None or not record.finite:
            return False
        rows = np.zeros((len(check.where), _WIDTH))
        kept = self._store.kept(check.where, self._side.fetched, self._weigh)
        for row, name in zip(rows, check.where, strict=True):
            if name not in check.buffers:
                row[:] = math.nan
                continue
            buffer, at = check.buffers[name]
            numbers = check.averages[name] if name in check.averages else buffer.index_select(0, at)
            average = _sketch(_host(numbers), check.signs)[:-1] / check.scale * self._groups.num_ranks
            given, after = _sketch(self._given(check, name), check.signs), _sketch(kept[name][0], check.signs)
            row[: 4 * SIZE] = np.concatenate((given[:-1], check.kept[name], after[:-1], average))
            row[4 * SIZE : -3] = _sketch(kept[name][1], check.signs, OWN_SIZE)[:-1]
            row[-3:] = _square(average), given[-1], after[-1]
        types = [check.given[name].dtype if name in check.given else torch.float32 for name in check.where]
        check.eps = np.array([torch.finfo(dtype).eps for dtype in types])
        check.given, check.buffers, check.averages = {}, {}, {}
        self._summing = check, self._groups.start_sum(torch.from_numpy(rows))
        self._next, self._turn = record.iteration + self._apart, self._turn + 1
        if check.in_use:
            self._looked_at = self._looked_at[0], self._looked_at[1] + 1
        return False

    def _given(self, check: _Check, name: str) -> Array:
        """What of a tensor is to be sent, with what was kept of it."""
        gradient = _host(check.given[name]) / check.scale
        if self._velocities is None:
            return gradient
        return self._velocities.rule.added(check.moving[name], gradient)

    @property
    def is_told(self) -> bool:
        """Whether the latest check's sums are there, if there was one."""
        return self._summing is None or self._summing[1].is_done

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`look` would return at once. It never does where other shards of the job have to agree."""
        return self.is_told and self._groups.beside is None

    def look(self) -> list[Alarm]:
        """Judge the latest check, the same on all ranks; may wait for its sums."""
        if self._summing is None:
            return []
        (check, summing), self._summing = self._summing, None
        rows = summing.rows()[0].numpy()
        all_figures = _figures(rows, self._groups.num_ranks, check.eps).T.tolist()
        found: dict[str, str] = {}
        of_group: dict[str, list[tuple[float, ...]]] = {}
        for (name, choice), row, figures in zip(check.choices.items(), rows, all_figures, strict=True):
            if math.isnan(row[0]):  # some rank had no gradient of it
                continue
            owes = 0.0
            if (square := figures[3]) > 0:
                owes = _owed(row, choice)
                if check.in_use:
                    counted_as = choice, check.gain_scale
                    if name not in self._owed or self._owed[name][0] != counted_as:
                        self._owed[name] = counted_as, deque(maxlen=OWED_CHECKS)
                    corrected = self._velocities is not None
                    felt = rings(choice.compressor, self._store.gain, check.gain_scale, corrected=corrected)
                    self._owed[name][1].append((felt**2 * owes * square, square))
            kept = owes * square if _sums_inside(choice) else figures[4]
            of_group.setdefault(self._group_of[name], []).append((*figures[:4], kept))
            storage = choice.compressor.residual_dtype or self._store.storage
            reason = _why_out(figures, choice.compressor, storage)
            if reason:
                found[name] = reason
        for group, members in of_group.items():
            lost, deviation, exact, square, kept = (math.fsum(column) for column in zip(*members, strict=True))
            self.figures[group] = {
                "deviation": math.sqrt(deviation / exact) if exact else 0.0,
                "residual_ratio": math.sqrt(kept / square) if square else 0.0,
                "lost": math.sqrt(lost / exact) if exact else 0.0,
            }
        if self._groups.beside is not None:
            found = dict(chain.from_iterable(theirs.items() for theirs in self._groups.beside.all_objects(found)))
        self._out = {name: self._out.get(name, 0) + 1 for name in found}
        if found:
            self._next, self._turn = check.iteration + AGAIN, self._turn - 1  # the same tensors once more
        worst = {name: found[name] for name, times in self._out.items() if times >= CONFIRMED}
        return self._alarms(worst)

    def owed(
        self, checks: int = 1, *, without: int | None = None, scale: float | None = None
    ) -> dict[str, tuple[Choice, float]]:
        """By tensor its choice and the gradients that it owes, as a budget counts them
        (:mod:`espresso.search.error_budget`); equal on all ranks.

        Over the latest ``OWED_CHECKS`` of them squares are added up before they are divided: where a batch is learnt
        its gradient is next to nothing, and what is owed then is many times that.

        Args:
            checks: tensors that were looked at less often are left out.
            without: one of the checks that is left out of the figures.
            scale: tensors exchanged beside another :func:`~espresso.compressors.base.gain_scale` are left out.
        """
        found = {}
        for name, ((choice, beside), seen) in self._owed.items():
            if len(seen) >= checks and scale in (None, beside):
                counted = [check for number, check in enumerate(seen) if number != without]
                kept, squares = (math.fsum(column) for column in zip(*counted, strict=True))
                found[name] = choice, math.sqrt(kept / squares)
        return found

    def _alarms(self, reasons: Mapping[str, str]) -> list[Alarm]:
        groups = dict.fromkeys(self._group_of[name] for name in reasons)
        alarms = []
        for group in groups:
            name = next(name for name in reasons if self._group_of[name] == group)
            members = tuple(other for other, theirs in self._group_of.items() if theirs == group)
            alarms.append(Alarm(group, members, f"tensor group {group!r} ({name}): {reasons[name]}"))
        return alarms


def _sketch(values: Array, signs: Array, size: int = SIZE) -> Array:
    """float64[size + 1], the sum of squares behind it."""
    found = np.empty(size + 1)
    sketch(values, signs, found)
    return found


def _places(numels: Mapping[str, int], draws: np.random.Generator) -> dict[str, Places]:
    """All of a tensor, or runs of it: one anywhere in each of equal parts, the same on every rank.

    Rows of a gradient differ by orders of magnitude: a few in one place say little of the others. What is owed counts
    by elements, so the larger tensors are looked at more closely.
    """
    each, total = MOST // (2 * max(len(numels), 1)), sum(numels.values())
    found = {}
    for name, numel in numels.items():
        most = min(each + MOST // 2 * numel // total, MOST)
        if numel <= most:
            found[name] = np.arange(numel)
            continue
        runs = most // RUN
        part = numel // runs
        begins = np.arange(runs) * part + (draws.random(runs) * (part - RUN + 1)).astype(np.int64)
        found[name] = (begins[:, None] + np.arange(RUN)).ravel()
    return found


def _host(numbers: torch.Tensor) -> Array:
    """As it is, or as float32."""
    short = numbers.dtype not in (torch.float32, torch.float64)
    found: Array = (numbers.float() if short else numbers).cpu().numpy()
    return found


def _square(sketches: Array) -> Array:
    """Of each row of sketches."""
    found: Array = np.square(sketches).sum(axis=-1)
    return found


def _figures(rows: Array, num_ranks: int, eps: Array) -> Array:
    """float64[8, tensors]: squares, of what is seen of a tensor: lost, deviation, the exact sum, gradients, kept; the
    part sent of the owed; what rounding may lose: of the average in its type (``eps``), and of what is owed in
    float32; and by what square ranks' averages lie apart.

    Args:
        rows: of all ranks, added up.
    """
    given, before, after, averages = (rows[..., at : at + SIZE] for at in range(0, 4 * SIZE, SIZE))
    averages = averages / num_ranks
    squares, square, kept = (rows[..., at] for at in (-3, -2, -1))
    owed = given + before
    sent, of_owed = _square(averages), _square(owed)
    exact = np.maximum(_square(given), 1e-300)
    part = np.where(square > 0, sent / np.maximum(of_owed, 1e-300), 1.0)
    rounding = eps * np.sqrt(sent) + ROUNDED * FLOAT32_EPS * np.sqrt(of_owed)
    lost, deviation = _square(averages - (owed - after)), _square(averages - given)
    apart = np.maximum(squares / num_ranks - sent, 0.0)
    return np.stack((lost, deviation, exact, square, kept, part, rounding, apart))


def _is_seen(choice: Choice) -> bool:
    """What servers keep is not here."""
    return choice.option.is_compressed and not choice.option.uses_servers


@cache
def _traits(compressor: CompressorSpec) -> Traits:
    return create(compressor).traits


def _sums_inside(choice: Choice) -> bool:
    """Whether all ranks send one thing together: what a rank's gradients have apart from the others' then stays, and
    grows, in its residual, and cancels in the sum.
    """
    return _traits(choice.compressor).rounds > 1


def _weights(rank: int, cluster: Cluster) -> Callable[[Site], float]:
    """By site, what a rank's residual counts: of all that keep some of an element these add up to 0, and their squares
    to how many they are. Those are all ranks, one of each node, or one alone, which counts as it is.
    """

    def weight(index: int, number: int) -> float:
        return math.cos(2 * math.pi * index / number) * (math.sqrt(2) if number > 2 else 1.0)

    found = {
        Site.LOCAL: weight(rank, cluster.num_ranks),
        Site.INTER_FIRST: weight(rank // cluster.ranks_per_node, cluster.num_nodes),
    }
    return lambda site: found.get(site, 1.0)


def _owed(row: Array, choice: Choice) -> float:
    """Square of what a rank owes for itself, in gradients; of one thing that all send, of what its sum owes.

    What all ranks owe alike cancels by their weights.
    """
    if _sums_inside(choice):
        return float(_square(row[2 * SIZE : 3 * SIZE]) / max(_square(row[:SIZE]), 1e-300))
    return float(_square(row[4 * SIZE : -3]) / max(row[-2], 1e-300))


def _why_out(figures: Sequence[float], compressor: CompressorSpec, storage: str) -> str:
    """What is wrong with a tensor; empty if nothing is."""
    lost, _, exact, square, kept, part, rounding, apart = figures
    if not square:
        return ""
    traits = _traits(compressor)
    band = BAND if traits.error_feedback or traits.lossless else CAST_BAND
    if traits.stochastic and not traits.error_feedback:
        band = math.inf  # right on average: a step may lose a whole gradient
    # Beside the sketch's own size: gradients of the ranks may cancel in the sum.
    size = math.sqrt(max(exact, square))
    if math.sqrt(apart) > BAND * size:
        return f"ranks have unlike averages of it (off by {math.sqrt(apart) / size:.0%}); go on from a checkpoint"
    out = math.sqrt(lost) / size
    if out > band + ROUNDING[storage] * math.sqrt(kept / square) + rounding / size:
        return f"what was sent and kept is not what came in (off by {out:.0%} of the gradient)"
    # Of so little sparsifiers may well send nothing.
    if part < NOTHING and not traits.sparse and math.sqrt(kept / square) > 1:
        return "nothing of it is sent"
    return ""
