"""Findings: what each thing costs, how sure that is, what to do, and what it would bring by the timeline.

Every rule changes the recorded turns or the costs of their exchanges as if its cause were gone, and replays both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from espresso.diagnosis.overlap import hidden
from espresso.diagnosis.rebucketing import fit, plain_costs, rebucketed
from espresso.diagnosis.replay import (
    EVEN_BYTES,
    LEAST_LATENCY_US,
    Costs,
    bucket_bytes,
    costs_of,
    exposed,
    passes_of,
    replay,
    sample,
    shared,
    with_part,
)
from espresso.diagnosis.report import Diagnosis, Finding
from espresso.diagnosis.turns import Part, Run, Turn
from espresso.flight.form import Flight, Traffic

LEAST_SHARE = 0.05
"""Of a step: a smaller gain is no finding."""

LEAST_GAIN_US = 300.0
"""Nor is one of less than this: waking a thread takes as long."""

LATE_SHARE = 0.12
"""Of a step, for exchanges that begin late: what the timeline does not explain of clean steps comes to half of it."""

OFTEN = 0.7
"""Of the steps, a worker must be the last to be counted as slow: of two equal ones each is, in half of them."""

SPELLS = 3
"""Parts of a run, in each of which it must: what comes and goes is not the worker's."""

SLOW_CARD = 0.7
"""Of the others' rate."""

CARD_SHARE = 0.08
"""Of a step, for a thin card: a peer that is late makes a connection look slow too."""

SLOW_CODER = 1.4
"""Times the others' compression."""

WINDOWED = 0.3
"""Of the time in which connections send, waiting for a window."""

ALIKE = 0.3
"""A worker whose one pass is slowed by less than this part of how the other is slowed is slow in the other alone."""

LACKED = 0.5
"""Of what a worker takes longer, spent without a core: it is other processes or a quota, whatever pass they hit."""

COMPUTE = ("optimizer", "earlier", "forward", "loss", "backward")
"""What a worker does on its own processor."""

TOGETHER = 0.5
"""Of what the slowest rank of a host takes longer than other hosts', each must, where the host is to blame."""

MUCH = 0.5
"""Of what the rank of a host that sends most sends away."""

Who = tuple[int, ...]
"""Ranks by their place in the run: one, or all of a host."""

CAPS_MB = (1, 5, 10, 25, 50, 100)
BOUNDS = {"compute": COMPUTE, "input": ("input",), "network": ("prepare", "exposed")}
"""What a step can be bound by: the phases that it takes."""


def diagnose(flights: Sequence[Flight]) -> Diagnosis:
    """What is slow in a run, the worst first.

    Args:
        flights: of its ranks; some may be missing.

    Raises:
        FlightError: records of different runs, or too few steps.
    """
    return _Case(Run(flights)).diagnosis()


class _Case:
    """One run, its costs, and the rules."""

    def __init__(self, run: Run) -> None:
        self.run, self.costs, self.turns = run, costs_of(run), sample(run.turns)
        self.now_us = [replay(turn, self.costs) for turn in self.turns]
        self.passes = self._passes()
        self.step_us = median(turn.measured for turn in run.turns) * self.passes
        self.hosts = list(dict.fromkeys(run.hosts))
        self.is_plain = run.stretch.strategy.only_averages
        self.words = _FSDP if run.flights[0].facts.get("sharded") is True else _DDP
        self._last = [turn.last for turn in run.turns]

    def diagnosis(self) -> Diagnosis:
        rules = (
            self.slow_workers, self.slow_coders, self.thin_cards, self.broadcasts, self.accumulation, self.latency,
            self.connections, self.buckets, self.late_starts,
        )  # fmt: skip
        found = [finding for rule in rules for finding in rule()]
        found.sort(key=lambda finding: -finding.gain_us * finding.confidence)
        comm = self.costs.exchange_us + sum(max(each) for each in self.costs.coding_us.values())
        open_us = median(min(part.exposed for part in turn.parts) for turn in self.run.turns)
        predicted = median(exposed(turn, self.costs) for turn in self.turns)
        shares, flights = self._shares(), self.run.flights
        bound = max(BOUNDS, key=lambda name: sum(shares[phase] for phase in BOUNDS[name]))
        return Diagnosis(
            tuple(found),
            self.step_us,
            median(self.now_us) * self.passes,
            hidden(open_us, comm) if comm > 0 else None,
            hidden(predicted, comm) if comm > 0 else None,
            found[0].kind if found else bound,
            len(self.run.turns),
            self.run.num_ranks,
            shares,
            tuple(map(flights[0].name_of, sorted(set(range(self.run.num_ranks)) - {one.rank for one in flights}))),
            flights[0].other_groups,
        )

    # -- what every rule needs -----------------------------------------------------------------------

    def gain(self, change: Callable[[Turn], Turn], costs: Costs | None = None, *, broadcasts: bool = True) -> float:
        """What an optimizer's step is shorter with changed turns or costs, by the timeline."""
        costs, then = costs or self.costs, []
        for turn, now in zip(self.turns, self.now_us, strict=True):
            changed = shared(turn, self.costs, change(turn), costs)
            then.append(now - replay(changed, costs, broadcasts=broadcasts))
        return median(then) * self.passes

    def counts(self, gain_us: float, share: float = LEAST_SHARE) -> bool:
        return gain_us > max(share * self.step_us, LEAST_GAIN_US)

    def _passes(self) -> int:
        """Exchanges of an optimizer's step."""
        stepped = sum(turn.parts[0].stepped for turn in self.run.turns)
        return max(round(len(self.run.turns) / stepped), 1) if stepped else 1

    def _shares(self) -> dict[str, float]:
        names = ("optimizer", "input", "earlier", "prepare", "forward", "loss", "backward", "exposed")
        means = {n: median(median(getattr(p, n) for p in turn.parts) for turn in self.run.turns) for n in names}
        whole = sum(means.values())
        return {name: us / whole if whole else 0.0 for name, us in means.items()}

    def _finding(
        self, kind: str, place: int | None, cost_us: float, gain_us: float, confidence: float, remedy: str, detail: str
    ) -> Finding:
        rank = None if place is None else self.run.flights[place].name
        host = None if place is None else self.run.hosts[place]
        return Finding(kind, rank, host, cost_us, gain_us, min(max(confidence, 0.0), 1.0), remedy, detail)

    # -- workers -------------------------------------------------------------------------------------

    def slow_workers(self) -> Iterator[Finding]:
        """Who makes the others wait, and in what: no clock is needed for that."""
        for who in self._late_ones():
            often = self._often(who)
            excess = {phase: self._excess(who, phase) for phase in ("input", "forward", "backward", "optimizer")}
            said = ", ".join(f"{phase} {us / 1e3:+.1f} ms" for phase, us in excess.items())
            detail = f"last in {often:.0%} of the steps or more; against the others: {said}"
            for kind, phases in self._suspects(who):
                costs = self._at_pace(who) if kind == "slow_worker" else self.costs
                gain = self.gain(partial(_like_the_others, who=who, phases=phases), costs)
                cost = sum(excess.get(phase, 0.0) for phase in phases) * self.passes
                if self.counts(gain):
                    flight, host = self.run.flights[who[0]], self.run.hosts[who[0]]
                    named = f"rank {flight.name} on {host}" if len(who) == 1 else f"every rank on {host}"
                    found = self._finding(
                        kind, who[0], cost, gain, often, _REMEDIES[kind].format(who=named), detail
                    )  # fmt: skip
                    yield found if len(who) == 1 else replace(found, rank=None)

    def _late_ones(self) -> list[Who]:
        """Whom the others wait for in most steps: hosts of which every rank is slow, whichever is last, and ranks."""
        hosts = self.run.hosts
        if len(hosts) < 2:
            return []
        groups = [tuple(place for place, at in enumerate(hosts) if at == host) for host in self.hosts]
        found = [who for who in groups if 1 < len(who) < len(hosts) and self._are_late(who)]
        others = set(range(len(hosts))).difference(*found)
        return found + [(place,) for place in sorted(others) if self._often((place,)) >= OFTEN]

    def _are_late(self, who: Who) -> bool:
        """Whether a host's ranks are, each of them for itself."""
        # Of two equal hosts each is in half of the steps, and of unequal ones that with more ranks more often.
        by_chance = len(who) / len(self.run.hosts)
        if 1 - self._often(who) > (1 - OFTEN) * min(2 * (1 - by_chance), 1):
            return False
        each = [
            median(
                sum(_phase(turn.parts[place], phase) - _others(turn, who, phase) for phase in ("input", *COMPUTE))
                for turn in self.run.turns
            )
            for place in who
        ]
        return min(each) > TOGETHER * max(each)

    def _often(self, who: Who) -> float:
        """In how many of the steps one of them is the last of all, in the part of the run where that is least often."""
        ends = [len(self._last) * spell // SPELLS for spell in range(SPELLS + 1)]
        shares = [[last in who for last in self._last[a:b]] for a, b in pairwise(ends) if b > a]
        return min(sum(share) / len(share) for share in shares)

    def _suspects(self, who: Who) -> list[tuple[str, tuple[str, ...]]]:
        """Kinds of slowness, and the phases that each would mend."""
        compute = self._slow_in(who)
        late = ("input",)
        gain = self.gain(lambda turn: _like_the_others(turn, who, late))
        if compute == "slow_backward" and self.counts(gain):
            # Who comes late exchanges while it computes, and its backward pass shares the cores with that.
            return [("slow_input", (*late, "backward"))]
        return [("slow_input", late), (compute, COMPUTE)]

    def _at_pace(self, who: Who) -> Costs:
        """A worker that computes slowly also carries out its part of the exchanges slowly."""
        own = [sum(_own(turn, who, phase) for phase in COMPUTE) for turn in self.run.turns]
        usual = [sum(_others(turn, who, phase) for phase in COMPUTE) for turn in self.run.turns]
        pace = median(a / b for a, b in zip(own, usual, strict=True) if b > 0)
        return self.costs.at_pace(max(pace, 1.0), min(self._cards(), default=None))

    def _slow_in(self, who: Who) -> str:
        """Whether a worker is slow in all it computes, or in one of the two passes."""
        pace = {phase: median(self._paces(who, phase)) - 1 for phase in ("forward", "backward")}
        if not any(part.forward for turn in self.run.turns for part in turn.parts):
            return "slow_worker"  # nobody saw its passes apart
        if self._lacks_a_core(who):
            return "slow_worker"  # a quota comes where it will: it says nothing about the pass that it hits
        if pace["forward"] < ALIKE * pace["backward"]:
            return "slow_backward"
        return "slow_forward" if pace["backward"] < ALIKE * pace["forward"] else "slow_worker"

    def _lacks_a_core(self, who: Who) -> bool:
        """Whether most of what it takes longer than the others it could have run, and others had its core."""
        waited = [[s.script.waited_us for s in f.steps if s.script.waited_us is not None] for f in self.run.flights]
        if not all(waited):
            return False
        each = [median(rank) for rank in waited]
        longer = sum(self._excess(who, phase) for phase in COMPUTE)
        mine, others = (median(us for at, us in enumerate(each) if (at in who) is ours) for ours in (True, False))
        return mine - others > LACKED * longer > 0.0

    def _paces(self, who: Who, phase: str) -> list[float]:
        """How many times as long as the others it takes, step by step."""
        mine = [_own(turn, who, phase) for turn in self.run.turns]
        others = [_others(turn, who, phase) for turn in self.run.turns]
        return [a / b if b > 0 else 1.0 for a, b in zip(mine, others, strict=True)]

    def _excess(self, who: Who, phase: str) -> float:
        return median(_own(turn, who, phase) - _others(turn, who, phase) for turn in self.run.turns)

    def slow_coders(self) -> Iterator[Finding]:
        """Whose compression takes longer than the others'."""
        if len(self.run.flights) < 2 or not self.costs.coding_us:
            return
        sums = [sum(each[place] for each in self.costs.coding_us.values()) for place in range(len(self.run.flights))]
        for place, mine in enumerate(sums):
            usual = median(other for at, other in enumerate(sums) if at != place)
            if mine < SLOW_CODER * usual:
                continue

            def without(each: tuple[float, ...], place: int = place) -> float:
                return max(us for at, us in enumerate(each) if at != place)

            gain = self.gain(lambda turn: turn, self.costs.with_coding(without))
            if self.counts(gain):
                yield self._finding(
                    "slow_encoder", place, (mine - usual) * self.passes, gain, min(1.0, mine / usual / 2),
                    f"give rank {self.run.flights[place].name} on {self.run.hosts[place]} cores of its own: another"
                    " process uses them, or its pool has more threads than cores (offload_threads)",
                    f"compression takes {mine / 1e3:.1f} ms a step there, {usual / 1e3:.1f} ms elsewhere",
                )  # fmt: skip

    # -- the network ---------------------------------------------------------------------------------

    def thin_cards(self) -> Iterator[Finding]:
        """Whose connections send more slowly while they have something to send."""
        rates = self._cards(apart=True)
        for place, host in enumerate(self.hosts[: len(rates)]):
            mine, others = rates[place], [*rates[:place], *rates[place + 1 :]]
            if not others or mine > SLOW_CARD * median(others):
                continue
            factor = mine / min(others)
            gain = self.gain(lambda turn: turn, self.costs.at_rate(mine, min(others)))
            if self.counts(gain, CARD_SHARE):
                at, cost = self.run.hosts.index(host), self.costs.exchange_us * (1 - factor) * self.passes
                yield self._finding(
                    "thin_card", at, cost, gain, 1 - factor / 2,
                    f"look at the network card, cable, switch port and rate limits of {host}: all others wait for it",
                    f"{host} sends at {mine * 8:.0f} Mb/s while it sends, the others at {median(others) * 8:.0f}",
                )  # fmt: skip

    def latency(self) -> Iterator[Finding]:
        """Exchanges whose round trips are not hidden."""
        if not any(self.costs.latency_us):
            return
        gain = self.gain(lambda turn: turn, self.costs.without_latency())
        if self.counts(gain):
            each = max(self.costs.latency_us)
            yield self._finding(
                "latency_bound", None, gain, gain, 0.8,
                f"fewer and larger rounds: {self.words['larger']}, an option of fewer steps, no PowerSGD or"
                " parameter servers; or ranks closer together",
                f"an exchange spends {each / 1e3:.1f} ms on the way, and there are {len(self.costs.exchanges)} a step",
            )  # fmt: skip

    def connections(self) -> Iterator[Finding]:
        """Connections that wait for their window while the card is idle."""
        shares = [share for share in map(_windowed, self.run.flights) if share is not None]
        if not shares or median(shares) < WINDOWED:
            return
        gain = self.gain(lambda turn: turn, self.costs.faster(1 - median(shares)))
        if self.counts(gain):
            yield self._finding(
                "one_connection", None, gain, gain, 0.6,
                "raise the largest of net.ipv4.tcp_rmem and tcp_wmem to rate times round trip on all hosts; or open"
                " more connections: connections=4 in espresso.register and a strategy in partitions, or with NCCL over"
                " sockets NCCL_NSOCKS_PERTHREAD",
                f"connections wait for their window in {median(shares):.0%} of the time in which they send",
            )  # fmt: skip

    # -- how DDP is set ------------------------------------------------------------------------------

    def broadcasts(self) -> Iterator[Finding]:
        """Buffers that DDP broadcasts before every forward pass."""
        size = max(flight.fact("buffer_bytes", 0) for flight in self.run.flights)
        if not size:
            return
        gain = self.gain(lambda turn: turn, broadcasts=False)
        if self.counts(gain, LEAST_SHARE / 2):
            cost = median(turn.broadcast for turn in self.run.turns) * self.passes
            yield self._finding(
                "buffer_broadcast", None, cost, gain, 0.9,
                "DistributedDataParallel(broadcast_buffers=False), in newer PyTorch forward_sync_buffers=False, if the"
                " buffers need not be equal while training (batch norm's running means; or use SyncBatchNorm)",
                "buffers are sent before every forward pass" + (f", {size / 1e3:.0f} kB of them" if size > 1 else ""),
            )  # fmt: skip

    def accumulation(self) -> Iterator[Finding]:
        """Passes between two steps of the optimizer that exchange, all but the last in vain."""
        if self.passes < 2:
            return
        each = self.gain(lambda turn: turn, self.costs.idle(), broadcasts=False) / self.passes
        gain = each * (self.passes - 1)
        if self.counts(gain, LEAST_SHARE / 2):
            yield self._finding(
                "missing_no_sync", None, gain, gain, 0.95,
                self.words["no_sync"],
                f"gradients are exchanged {self.passes} times for one step of the optimizer",
            )  # fmt: skip

    def buckets(self) -> Iterator[Finding]:
        """Another bucket_cap_mb."""
        before = self.run.stretch.buckets
        if not self.is_plain or not any(self.costs.task_us):
            return
        line, latency = fit(self.costs, self._us_per_byte()), max(self.costs.latency_us, default=0.0)
        found: list[tuple[float, int, int]] = []
        total = sum(map(bucket_bytes, before))
        for cap in CAPS_MB:
            buckets, _ = rebucketed(self.turns[0], before, cap * (1 << 20))
            if len(buckets) == len(before):
                continue
            core_us = self.costs.core_us * (total + EVEN_BYTES * len(buckets)) / (total + EVEN_BYTES * len(before))
            hook_us = self.costs.hook_us * len(buckets) / len(before)
            costs = plain_costs(self.run.stretch.strategy, buckets, line, latency, core_us, hook_us)
            gain = self.gain(lambda turn, c=cap: rebucketed(turn, before, c * (1 << 20))[1], costs)  # type: ignore[misc]
            found.append((gain, -cap, len(buckets)))
        gain, cap, count = max(found, default=(0.0, -1, 0))
        is_small = count < len(before)
        if not self.counts(gain):
            return
        largest = max(map(bucket_bytes, before)) / 1e6
        yield self._finding(
            "buckets_too_small" if is_small else "buckets_too_large", None, gain, gain, 0.7,
            self.words["cap"].format(cap=-cap),
            f"{len(before)} buckets of at most {largest:.2g} MB; {count} would do better: "
            + ("every exchange has a fixed cost" if is_small else "the first exchange begins late"),
        )  # fmt: skip

    def _us_per_byte(self) -> float | None:
        """What the bytes of a bucket take at the rate of the cards; None where that is not known."""
        passes, largest = passes_of(self.run.num_ranks), max(map(bucket_bytes, self.run.stretch.buckets))
        rates = self._cards(apart=True)
        if rates and largest * passes / min(rates) > LEAST_LATENCY_US:  # what is shorter waits more than it sends
            rates = self._cards()
        return passes / min(rates) if rates else None

    def _cards(self, *, apart: bool = False) -> list[float]:
        """What every host's card sends, in bytes a microsecond; none where that is not known of all.

        It is what it sent at the start, while nothing else did. One card may have become thin since then: the one whose
        connections are slowest, by far; answers to the others wait behind what it sends. Where round trips are long, or
        nobody looked at the start, it is what each host's connections send while they send.

        Args:
            apart: by far from the others' too. Where all are slow alike, they wait for who wakes to answer what is
                small, and no card is thin.
        """
        each = [
            [f for f, at in zip(self.run.flights, self.run.hosts, strict=True) if at == host] for host in self.hosts
        ]
        alone = [max(flight.fact("card_rate", 0.0) for flight in flights) for flights in each]
        busy = [rate for rate in map(_rate_of, each) if rate is not None]
        if any(self.costs.latency_us) or not all(alone):
            return busy if len(busy) == len(each) else []
        others = sorted(busy)[1:] if apart else alone
        if len(busy) == len(each) and others and min(busy) < SLOW_CARD * min(min(alone), median(others)):
            alone[busy.index(min(busy))] = min(busy)
        return alone

    def late_starts(self) -> Iterator[Finding]:
        """Exchanges that begin long after their bucket is there and the link is free."""
        measured = median(turn.measured for turn in self.turns)
        lost = (measured - median(self.now_us)) * self.passes
        late = self._late_us() * self.passes
        gain = min(lost, late)
        if self.counts(gain, LATE_SHARE):
            yield self._finding(
                "unused_overlap", None, gain, gain, 0.6,
                "let exchanges start during backward: no hook that waits inside, no static work between backward and"
                " the exchange, cores left for the library's threads",
                f"exchanges start {late / 1e3:.1f} ms later than they could, all together",
            )  # fmt: skip

    def _late_us(self) -> float:
        late = []
        for ranks in self.run.spans():
            spans = sorted(ranks[0], key=lambda span: span.start_us)
            free, lost = 0.0, 0.0
            for span in spans:
                if span.num_bytes:
                    lost += max(span.start_us - max(span.issue_us, free), 0.0)
                    free = max(free, span.end_us)
            late.append(lost)
        return median(late) if late else 0.0


_DDP = {
    "larger": "a larger bucket_cap_mb",
    "cap": "DistributedDataParallel(bucket_cap_mb={cap:g})",
    "no_sync": "run the backward passes before the last one under model.no_sync()",
}
_FSDP = {
    "larger": "larger modules for fully_shard",
    "cap": "fully_shard on modules of about {cap:g} MB a shard: several blocks together, or parts of one",
    "no_sync": "call model.set_requires_gradient_sync(False) before the first of these passes, and (True) before"
    " the last",
}
"""How what sends gradients is told what a finding asks for."""

_REMEDIES = {
    "slow_input": "{who} comes late to its forward pass: more DataLoader workers, pin_memory, prefetch,"
    " a faster disk, less augmentation there; or it does between steps what the others do not (logging, checkpoints)",
    "slow_forward": "look at what {who} does in forward that the others do not: longer sequences,"
    " host-side work, a slower device",
    "slow_backward": "look at what {who} does in backward that the others do not: a slower device,"
    " other memory, hooks on its gradients",
    "slow_worker": "{who} computes more slowly in everything: look for other processes, a CPU quota,"
    " throttling, OMP_NUM_THREADS; or give it a smaller share of the batch",
}


def _phase(part: Part, phase: str) -> float:
    return float(getattr(part, phase))


def _own(turn: Turn, who: Who, phase: str) -> float:
    return median(_phase(turn.parts[place], phase) for place in who)


def _others(turn: Turn, who: Who, phase: str) -> float:
    return median(_phase(part, phase) for place, part in enumerate(turn.parts) if place not in who)


def _like_the_others(turn: Turn, who: Who, phases: Sequence[str]) -> Turn:
    """The turn in which these ranks took as long as the others do, in these phases."""
    changed = turn
    for place in who:
        mine = turn.parts[place]
        now: dict[str, Any] = {phase: min(_phase(mine, phase), _others(turn, who, phase)) for phase in phases}
        backward = now.pop("backward", mine.backward)
        part: Part = replace(mine, **now)
        changed = with_part(changed, place, part.with_backward(backward))
    return changed


def _rate_of(flights: Sequence[Flight]) -> float | None:
    """Bytes a microsecond of a host, while something was on the way: of those of its ranks that send most.

    A ring leaves a host from one rank, and what others have on the way is next to nothing.
    """
    found = [seen for seen in map(_sent, flights) if seen is not None]
    most = max((num_bytes for num_bytes, _ in found), default=0.0)
    return median(rate for num_bytes, rate in found if num_bytes >= MUCH * most) if found else None


def _sent(flight: Flight) -> tuple[float, float] | None:
    """Bytes, and bytes a microsecond while something was on the way."""
    if len(flight.traffic) < 2:
        return None
    first, last = _looks(flight)
    busy = last.busy_us - first.busy_us - (last.window_us - first.window_us)
    num_bytes = float(last.num_bytes - first.num_bytes)
    return (num_bytes, num_bytes / busy) if busy > 0 else None


def _looks(flight: Flight) -> tuple[Traffic, Traffic]:
    """The last look before the steps that are kept, and the newest: a card may have become thin since the job began."""
    begun = flight.steps[0].script.began_us or flight.steps[0].done_us
    before = [look for look in flight.traffic[:-1] if look.at_us <= begun]
    return before[-1] if before else flight.traffic[0], flight.traffic[-1]


def _windowed(flight: Flight) -> float | None:
    if len(flight.traffic) < 2:
        return None
    first, last = _looks(flight)
    busy = last.busy_us - first.busy_us
    return (last.window_us - first.window_us) / busy if busy > 0 else None
