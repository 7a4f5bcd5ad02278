"""Nothing is lost: what was sent plus what is kept equals what came in, over any number of steps.

For every tensor, in units of the sum over ranks::

    sum over steps of average * P  +  everything the ranks keep  ==  sum over steps and ranks of gradients

exactly, where the compressor moves numbers unchanged and the numbers are small integers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.exchange import Exchange, digest, integers, make_buckets, numels_of, planned, snapshot, strategy_of
from benchmarks.rank_pool import NUM_RANKS, POOL
from espresso.comm.execute.executor import Assignment
from espresso.comm.program import TORCH_DTYPES
from espresso.compressors.registry import compressor_ids, create
from espresso.strategies import (
    PLAIN,
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Option,
    Strategy,
    options_for,
    parse_option,
    trace,
)

TWO_BY_TWO = Cluster(2, 2)
SIZES = ({"a": 5000, "b": 700}, {"tiny": 40, "c": 3001})
STEPS = 3

SPECS = {
    "efsignsgd": "efsignsgd",
    "onebit": "onebit",
    "twobit": "twobit",
    "fp8": "fp8",
    "threshold": "threshold:threshold=2,ratio=0.05",
    "stc": "stc:ratio=0.05",
    "topk": "topk:ratio=0.05",
    "dgc": "dgc:ratio=0.05",
    "int8": "int8",
    "int4": "int4",
    "randomk": "randomk:ratio=0.05",
}
EXACT = ("topk", "dgc", "threshold", "randomk")
"""Move numbers unchanged, so that the law holds without rounding on small integers."""

ROUNDING = 2e-5
"""What fp32 may lose over the steps of a test, for numbers of the order of one."""

SHAPES = {
    "flat allgather": "comp > flat.allgather > dec",
    "flat pair": "comp > flat.all_to_all > dec > comp > flat.allgather > dec",
    "flat rooted": "comp > flat.gather > dec > comp > flat.broadcast > dec",
    "flat raw first": "flat.reduce_scatter > comp > flat.allgather > dec",
    "inter pair": "intra.reduce_scatter > comp > inter.all_to_all > dec > comp > inter.allgather > dec"
    " > intra.allgather",
    "inter allgather": "intra.reduce_scatter > comp > inter.allgather > dec > intra.allgather",
    "inter rooted": "intra.reduce > comp > inter.gather > dec > comp > inter.broadcast > dec > intra.broadcast",
    "three sites": "comp > intra.all_to_all > dec > comp > inter.all_to_all > dec > comp > inter.allgather"
    " > intra.allgather > dec",
    "all payload, pairs": "comp > intra.all_to_all > dec > comp > inter.allgather > intra.allgather > dec",
    "all payload, rooted": "comp > intra.gather > inter.all_to_all > inter.allgather > intra.broadcast > dec",
    "replicas": "intra.reduce_scatter > inter.allreduce > comp > intra.allgather > dec",
    "four sites": "comp > intra.all_to_all > dec > comp > inter.all_to_all > dec > comp > inter.allgather"
    " > dec > comp > intra.allgather > dec",
    "replicas, rooted": "comp > intra.gather > dec > comp > inter.allgather > dec > comp > intra.broadcast > dec",
}
SUMMABLE = {
    "summable flat": "comp > flat.allreduce > dec",
    "summable pairs": "comp > intra.reduce_scatter > inter.reduce_scatter > inter.allgather > intra.allgather > dec",
    "summable rooted": "comp > intra.reduce > inter.reduce > inter.broadcast > intra.broadcast > dec",
}


def gradients(spec: str, buckets: Sequence[Bucket], rank: int, draw: int) -> list[torch.Tensor]:
    """Small integers for compressors that keep them, else normal numbers, which no quantizer represents."""
    if spec.partition(":")[0] in EXACT:
        return integers(buckets, rank, NUM_RANKS, draw)
    random = np.random.default_rng([draw, rank])
    return [torch.from_numpy(random.standard_normal(b.numel)).to(TORCH_DTYPES[b.dtype]) for b in buckets]


def sites_of(option: Option) -> set[str]:
    """Where the option compresses."""
    return {
        flow.site.value
        for rank in range(NUM_RANKS)
        for flow in trace(option, TWO_BY_TWO, 8192, rank)
        if flow.site is not None
    }


@cache
def every_option() -> dict[tuple[str, bool], Option]:
    return {(str(option), option.is_summable): option for option in options_for(TWO_BY_TWO, summable=True)}


def find_option(text: str, summable: bool = False) -> Option:
    """The leaf; summable leaves are spelt like the others where both exist."""
    return every_option()[text, summable]


@dataclass
class Ledger:
    """What one rank saw: the averages (the same everywhere), its own gradients, what it keeps."""

    digests: list[str]
    averages: dict[str, Any]
    gradients: dict[str, Any]
    kept: dict[str, Any]
    sites: set[str]
    bytes_sent: int
    bytes_raw: int
    norm: float
    finite: bool


class Books:
    """Keeps the ledger of an exchange while steps run."""

    def __init__(self, exchange: Exchange, numels: dict[str, int]) -> None:
        self.exchange, self.numels = exchange, numels
        self.averages = {name: np.zeros(numel) for name, numel in numels.items()}
        self.gradients = {name: np.zeros(numel) for name, numel in numels.items()}
        self.digests: list[str] = []
        self.bytes_sent = self.bytes_raw = 0
        self.finite = True

    def step(
        self, assignment: Assignment, buckets: Sequence[Bucket], mine: Sequence[torch.Tensor], **more: Any
    ) -> list[torch.Tensor]:
        scale = more.get("grad_scale", 1.0)
        got = self.exchange.step(assignment, buckets, [tensor * scale for tensor in mine], **more)
        for bucket, given, average in zip(buckets, mine, got, strict=True):
            for slot in bucket.slots:
                part = slice(slot.offset, slot.offset + slot.numel)
                self.gradients[slot.tensor] += given[part].double().numpy()
                self.averages[slot.tensor] += average[part].double().numpy() / scale
        self.digests.append(digest(got))
        self.finite &= all(bool(tensor.isfinite().all()) for tensor in got)
        self.bytes_sent += self.exchange.record.bytes_sent
        self.bytes_raw += self.exchange.record.bytes_raw
        return got

    def ledger(self) -> Ledger:
        return Ledger(
            self.digests,
            self.averages,
            self.gradients,
            self.exchange.kept(self.numels),
            self.exchange.sites(),
            self.bytes_sent,
            self.bytes_raw,
            self.exchange.store.norm(),
            self.finite,
        )


def imbalance(ledgers: Sequence[Ledger], *, residuals: float = 1.0) -> float:
    """The largest violation of the law; ``residuals`` 0 or -1 leaves them out or turns them round (controls)."""
    worst = 0.0
    for name, average in ledgers[0].averages.items():
        sent = average * len(ledgers)
        kept = sum(ledger.kept[name] for ledger in ledgers) * residuals
        given = sum(ledger.gradients[name] for ledger in ledgers)
        worst = max(worst, float(np.max(np.abs(sent + kept - given), initial=0.0)))
    return worst


def check_replicas(ledgers: Sequence[Ledger]) -> None:
    assert all(ledger.digests == ledgers[0].digests for ledger in ledgers)
    assert all(ledger.finite for ledger in ledgers)


# Every compressor on every shape


def run_shapes(rank: int, compressor: str, shapes: dict[str, tuple[str, bool]]) -> dict[str, Ledger]:
    """Every shape: two steps in plain order, then two in a list-scheduled one."""
    ledgers = {}
    exchange = Exchange(2)
    exchange.warm_up({compressor})
    buckets = make_buckets(*SIZES)
    for name, (text, summable) in shapes.items():
        choice = Choice(find_option(text, summable), CompressorSpec.parse(compressor))
        plain = Assignment(strategy_of(buckets, TWO_BY_TWO, choice, partition_bytes=8192))
        books = Books(exchange.renew(gain=None), numels_of(buckets))  # each compressor's own
        in_order = planned(plain, buckets)
        for step in range(STEPS):
            mine = gradients(compressor, buckets, rank, step)
            books.step(plain if step < 2 else in_order, buckets, mine)
        ledgers[name] = books.ledger()
    exchange.close()
    return ledgers


@pytest.mark.parametrize("name", [name for name in compressor_ids() if name in SPECS])
def test_every_compressor_on_every_shape(name):
    traits = create(SPECS[name]).traits
    shapes = {label: (text, False) for label, text in SHAPES.items()}
    if traits.summable:
        shapes |= {label: (text, True) for label, text in SUMMABLE.items()}
    answers = POOL.run(run_shapes, SPECS[name], shapes, deadline_s=120)
    for label, (text, summable) in shapes.items():
        ledgers = [answer[label] for answer in answers]
        check_replicas(ledgers)
        tolerance = 0.0 if name in EXACT else ROUNDING
        assert imbalance(ledgers) <= tolerance, f"{name} on {label}"
        # Controls: the same check sees a residual that is missing or has the wrong sign.
        assert imbalance(ledgers, residuals=0.0) > 100 * ROUNDING, f"{name} on {label}"
        assert imbalance(ledgers, residuals=-1.0) > 100 * ROUNDING, f"{name} on {label}"
        # Compression happened, at every site.
        assert sum(ledger.bytes_sent for ledger in ledgers) < sum(ledger.bytes_raw for ledger in ledgers)
        assert max(ledger.norm for ledger in ledgers) > 0
        seen = set().union(*(ledger.sites for ledger in ledgers))
        expected = sites_of(find_option(text, summable))
        if name in EXACT and label == "four sites":
            # What arrives there has exactly as many numbers as the last compression may send.
            expected -= {"intra_second"}
        assert seen >= expected, f"{name} on {label}"
        assert seen <= sites_of(find_option(text, summable)), f"{name} on {label}"


def test_every_lossy_compressor_is_covered():
    every = {name: create(name).traits for name in compressor_ids()}  # several rounds: test_powersgd.py
    lossy = {name for name, traits in every.items() if traits.error_feedback and traits.rounds == 1}
    assert lossy <= set(SPECS), "give the new compressor a spec in SPECS"


# The law notices an executor that loses or inverts residuals


def run_with_a_fault(rank: int, fault: str) -> Ledger:
    exchange = Exchange(2)
    exchange.warm_up({"topk:ratio=0.05"})
    commit = exchange.store.commit

    def faulty() -> None:
        commit()
        for residual in exchange.store.live:
            residual.old *= {"none": 1, "zeroed": 0, "flipped": -1}[fault]

    exchange.store.commit = faulty  # type: ignore[method-assign]
    buckets = make_buckets(*SIZES)
    choice = Choice(parse_option(SHAPES["flat pair"]), CompressorSpec.parse("topk:ratio=0.05"))
    assignment = Assignment(strategy_of(buckets, TWO_BY_TWO, choice))
    books = Books(exchange, numels_of(buckets))
    for step in range(STEPS):
        books.step(assignment, buckets, integers(buckets, rank, NUM_RANKS, draw=step))
    exchange.close()
    return books.ledger()


@pytest.mark.parametrize("fault", ["none", "zeroed", "flipped"])
def test_the_law_sees_a_faulty_executor(fault):
    ledgers = POOL.run(run_with_a_fault, fault)
    assert (imbalance(ledgers) == 0.0) is (fault == "none")


# Without transactions, in double precision


def run_double(rank: int, transactional: bool) -> Ledger:
    exchange = Exchange(2, transactional=transactional)
    exchange.warm_up({"efsignsgd"}, ["float64"])
    buckets = make_buckets(*SIZES, dtype="float64")
    choice = Choice(parse_option(SHAPES["four sites"]), CompressorSpec.parse("efsignsgd"))
    assignment = Assignment(strategy_of(buckets, TWO_BY_TWO, choice))
    books = Books(exchange, numels_of(buckets))
    for step in range(STEPS):
        books.step(assignment, buckets, gradients("efsignsgd", buckets, rank, step))
    exchange.close()
    return books.ledger()


def test_double_precision_and_both_memory_settings_give_the_same_bits():
    careful, frugal = (POOL.run(run_double, transactional) for transactional in (True, False))
    for ledgers in (careful, frugal):
        check_replicas(ledgers)
        assert imbalance(ledgers) < 1e-13
        assert imbalance(ledgers, residuals=0.0) > 0.1
    assert careful[0].digests == frugal[0].digests


# Changes in mid-run


def phases() -> list[tuple[tuple[Bucket, ...], Strategy]]:
    """Strategies that differ in option, compressor, partitions, buckets; raw ones between them."""
    first, rebuilt = make_buckets(*SIZES), make_buckets({"c": 3001, "a": 5000}, {"b": 700, "tiny": 40})
    merged = make_buckets({"b": 700, "a": 5000, "tiny": 40, "c": 3001})

    def one(buckets: Any, shape: str, spec: str, partition_bytes: int = 0, summable: bool = False) -> Any:
        texts = SHAPES | SUMMABLE
        choice = Choice(find_option(texts[shape], summable), CompressorSpec.parse(spec))
        return buckets, strategy_of(buckets, TWO_BY_TWO, choice, partition_bytes=partition_bytes)

    topk, dgc, randomk = SPECS["topk"], SPECS["dgc"], SPECS["randomk"]
    mixed = {
        "a": Choice(parse_option(SHAPES["three sites"]), CompressorSpec.parse(topk)),
        "b": PLAIN,
        "c": Choice(parse_option(SHAPES["replicas"]), CompressorSpec.parse(dgc)),
        "tiny": PLAIN,
    }
    return [
        one(first, "flat allgather", topk),
        one(first, "four sites", topk, 8192),
        one(first, "four sites", dgc, 4096),
        one(rebuilt, "four sites", dgc, 4096),
        (rebuilt, strategy_of(rebuilt, TWO_BY_TWO, PLAIN)),
        one(merged, "inter rooted", topk),
        one(merged, "summable pairs", randomk, 8192, summable=True),
        (first, strategy_of(first, TWO_BY_TWO, mixed)),
        one(first, "all payload, rooted", dgc, 8192),
        one(first, "replicas, rooted", topk, 8192),
        (merged, strategy_of(merged, TWO_BY_TWO, PLAIN)),
        (merged, strategy_of(merged, TWO_BY_TWO, PLAIN)),
    ]


def run_changes(rank: int, in_order: bool, steps: int) -> list[Ledger]:
    """The books after every phase."""
    exchange = Exchange(2)
    exchange.warm_up({SPECS[name] for name in EXACT})
    books = Books(exchange, numels_of(make_buckets(*SIZES)))
    ledgers = []
    draw = 0
    for buckets, strategy in phases():
        assignment = Assignment(strategy)
        if in_order:
            assignment = planned(assignment, buckets)
        for _ in range(steps):
            books.step(assignment, buckets, integers(buckets, rank, NUM_RANKS, draw))
            draw += 1
        ledger = books.ledger()
        ledger.averages = {name: values.copy() for name, values in ledger.averages.items()}
        ledger.gradients = {name: values.copy() for name, values in ledger.gradients.items()}
        ledger.digests = list(ledger.digests)
        ledgers.append(ledger)
    exchange.close()
    return ledgers


@pytest.mark.parametrize(("in_order", "steps"), [(False, 1), (True, 2)])
def test_changes_in_mid_run_lose_nothing(in_order, steps):
    answers = POOL.run(run_changes, in_order, steps)
    for phase in range(len(phases())):
        ledgers = [answer[phase] for answer in answers]
        check_replicas(ledgers)
        assert imbalance(ledgers) == 0.0, f"after phase {phase}"
    # A raw phase drains everything, so that the next one starts from nothing.
    for drained in (4, 10, 11):
        norms = [answer[drained].norm for answer in answers]
        assert norms == [0.0] * NUM_RANKS, f"after phase {drained}"
    assert all(max(answer[phase].norm for answer in answers) > 0 for phase in (0, 1, 2, 3, 5, 6, 7, 8, 9))


# Non-finite gradients


@dataclass
class Poisoned:
    """What one rank saw of a poisoned step between ordinary ones."""

    ledger: Ledger
    averages_finite: bool
    record_finite: bool
    residuals_unchanged: bool
    digest: str


def fingerprint(exchange: Exchange, summed: bool) -> list[Any]:
    """The bits of everything kept, site by site, or summed where they move between sites."""
    if summed:
        return [(name, values.tobytes()) for name, values in exchange.kept(numels_of(make_buckets(*SIZES))).items()]
    pieces, carry = snapshot(exchange.store)
    assert not carry
    return [(str(address), start, v.tobytes()) for address, parts in pieces.items() for start, v, _ in parts]


def run_poisoned(rank: int, cases: Sequence[tuple[Option, str, float]], carried: bool) -> list[Poisoned]:
    """Two steps, one with a poisoned number on rank 1, two more. With ``carried`` the later ones are raw."""
    found = []
    exchange = Exchange(2)
    exchange.warm_up({spec for _, spec, _ in cases})
    buckets = make_buckets(*SIZES)
    for option, spec, poison in cases:
        choice = Choice(option, CompressorSpec.parse(spec))
        first = Assignment(strategy_of(buckets, TWO_BY_TWO, choice, partition_bytes=8192))
        later = Assignment(strategy_of(buckets, TWO_BY_TWO, PLAIN)) if carried else first
        books = Books(exchange.renew(), numels_of(buckets))
        for step in range(2):
            books.step(first, buckets, gradients(spec, buckets, rank, step))
        mine = gradients(spec, buckets, rank, 9)
        if rank == 1:
            mine[0][4321] = poison
        before = fingerprint(exchange, carried)
        got = exchange.step(later, buckets, mine)
        unchanged = before == fingerprint(exchange, carried)
        finite, record_finite = bool(got[0].isfinite().all()), exchange.record.finite
        for step in range(2):
            books.step(later, buckets, gradients(spec, buckets, rank, 3 + step))
        found.append(Poisoned(books.ledger(), finite, record_finite, unchanged, digest(got)))
    exchange.close()
    return found


def check_poisoned(cases: Sequence[tuple[Option, str, float]], carried: bool = False) -> None:
    answers = POOL.run(run_poisoned, cases, carried, deadline_s=120)
    for number, (option, spec, poison) in enumerate(cases):
        what = f"{poison} through '{option}' with {spec}"
        rows = [answer[number] for answer in answers]
        assert not any(row.averages_finite for row in rows), what
        assert all(row.residuals_unchanged for row in rows), what
        assert not any(row.record_finite for row in rows), what
        assert len({row.digest for row in rows}) == 1, what
        ledgers = [row.ledger for row in rows]
        check_replicas(ledgers)
        assert imbalance(ledgers) <= (0.0 if spec.partition(":")[0] in EXACT else ROUNDING), what


@pytest.mark.parametrize("name", [name for name in compressor_ids() if name in SPECS])
def test_a_non_finite_gradient_shows_everywhere_and_spoils_nothing(name):
    """Each shape with every other compressor."""
    poisons = [np.inf, np.nan, -np.inf] * len(SHAPES)
    cases = [(parse_option(text), SPECS[name], poison) for text, poison in zip(SHAPES.values(), poisons, strict=False)]
    cases = cases[list(SPECS).index(name) % 2 :: 2]
    if create(SPECS[name]).traits.summable:
        cases += [(find_option(text, True), SPECS[name], np.inf) for text in SUMMABLE.values()]
    check_poisoned(cases)


def test_a_non_finite_gradient_keeps_what_is_carried():
    check_poisoned([(parse_option(SHAPES["four sites"]), SPECS["topk"], np.inf)], carried=True)


def run_overflow(rank: int) -> list[tuple[bool, bool, str]]:
    """A number that fp32 holds and fp16 does not, on rank 1."""
    found = []
    buckets = make_buckets(*SIZES)
    exchange = Exchange(2)
    exchange.warm_up({"fp16"})
    texts = [(text, False) for text in SHAPES.values()] + [(text, True) for text in SUMMABLE.values()]
    for text, summable in texts:
        strategy = strategy_of(buckets, TWO_BY_TWO, Choice(find_option(text, summable), CompressorSpec("fp16")))
        mine = integers(buckets, rank, NUM_RANKS)
        if rank == 1:
            mine[0][4321] = 1e6
        got = exchange.step(Assignment(strategy), buckets, mine)
        found.append((bool(got[0].isfinite().all()), bool(got[1].isfinite().all()), digest(got)))
    exchange.close()
    return found


def test_a_cast_that_overflows_shows_on_every_rank():
    for rows in zip(*POOL.run(run_overflow), strict=True):
        assert not any(finite for finite, _, _ in rows)
        assert all(finite for _, finite, _ in rows)
        assert len({bits for *_, bits in rows}) == 1


# Loss scale


def run_scaled(rank: int, spec: str, scales: Sequence[float]) -> list[str]:
    """Digests of the averages, unscaled: compressed steps, then raw ones that drain what was kept."""
    exchange = Exchange(2)
    exchange.warm_up({spec})
    buckets = make_buckets(*SIZES)
    choice = Choice(parse_option(SHAPES["four sites"]), CompressorSpec.parse(spec))
    compressed = Assignment(strategy_of(buckets, TWO_BY_TWO, choice))
    raw = Assignment(strategy_of(buckets, TWO_BY_TWO, PLAIN))
    random = np.random.default_rng([5, rank])
    digests = []
    for step, scale in enumerate(scales):
        mine = [torch.from_numpy(random.standard_normal(bucket.numel).astype(np.float32)) * scale for bucket in buckets]
        got = exchange.step(raw if step >= len(scales) - 2 else compressed, buckets, mine, grad_scale=scale)
        digests.append(digest([tensor / scale for tensor in got]))
    exchange.close()
    return digests


@pytest.mark.parametrize("name", [name for name in compressor_ids() if name in SPECS])
def test_a_change_of_the_loss_scale_changes_nothing(name):
    plain = POOL.run(run_scaled, SPECS[name], [1.0] * 6)
    scaled = POOL.run(run_scaled, SPECS[name], [65536.0, 65536.0, 131072.0, 0.5, 1024.0, 65536.0])
    assert all(answer == plain[0] for answer in plain + scaled)


def run_scaled_sums(rank: int, scales: Sequence[float]) -> list[str]:
    """The same through a summable leaf."""
    exchange = Exchange(2)
    exchange.warm_up({SPECS["randomk"]})
    buckets = make_buckets(*SIZES)
    choice = Choice(find_option(SUMMABLE["summable pairs"], True), CompressorSpec.parse(SPECS["randomk"]))
    assignment = Assignment(strategy_of(buckets, TWO_BY_TWO, choice))
    digests = []
    for step, scale in enumerate(scales):
        mine = [tensor * scale for tensor in integers(buckets, rank, NUM_RANKS, step)]
        got = exchange.step(assignment, buckets, mine, grad_scale=scale)
        digests.append(digest([tensor / scale for tensor in got]))
    exchange.close()
    return digests


def test_a_change_of_the_loss_scale_changes_nothing_for_sums():
    answers = [POOL.run(run_scaled_sums, scales) for scales in ([1.0] * 3, [1024.0, 2048.0, 0.25])]
    assert all(answer == answers[0][0] for four in answers for answer in four)
