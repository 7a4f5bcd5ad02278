"""A hundred forced switches between all shapes of leaves: nothing is lost, replicas stay equal, memory stays flat."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass, replace

import pytest

from benchmarks.exchange import Exchange, integers, make_buckets, numels_of, planned, strategy_of
from benchmarks.rank_pool import NUM_RANKS, POOL
from espresso.comm.execute.executor import Assignment
from espresso.strategies import PLAIN, Bucket, Choice, CompressorSpec
from tests.test_conservation import EXACT, SHAPES, SPECS, SUMMABLE, TWO_BY_TWO, Books, Ledger, find_option, imbalance

SWITCHES = 100
STEPS_EACH = 1
SETTLED = 40
"""Switches after which memory is compared: all shapes have run once."""

MORE_KB = 2600
"""What a process may have in use more after sixty further switches: what the test itself notes (1.8 MB), not one
residual of each switch besides, which would be 2 MB more."""


def choices() -> list[Choice]:
    """Every shape with a compressor that moves numbers unchanged, every third time plain."""
    texts = [(text, False) for text in SHAPES.values()] + [(text, True) for text in SUMMABLE.values()]
    found = []
    for number in range(SWITCHES):
        text, summable = texts[number % len(texts)]
        spec = "randomk" if summable else EXACT[number % len(EXACT)]
        choice = Choice(find_option(text, summable), CompressorSpec.parse(SPECS[spec]))
        found.append(PLAIN if number % 3 == 2 else choice)
    return found


@dataclass
class Told:
    """What one rank tells of its switches."""

    ledgers: list[Ledger]
    kept_bytes: list[int]
    in_use_kb: list[int]


class _Mallinfo(ctypes.Structure):
    """What glibc (2.33 or newer) tells of all its arenas."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _in_use_kb() -> int:
    """What was allocated and not freed. What is resident also counts what threads' arenas hold for later: a process
    that had run other tests had 7 MB of that more from one moment to the next.
    """
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    told = mallinfo()
    return (told.uordblks + told.hblkhd) // 1024


def copied(ledger: Ledger) -> Ledger:
    """What the books say now."""
    sums = ({name: values.copy() for name, values in each.items()} for each in (ledger.averages, ledger.gradients))
    averages, gradients = sums
    return replace(ledger, averages=averages, gradients=gradients, digests=list(ledger.digests))


def switch(rank: int) -> Told:
    """The same executor through all of them; a plain phase parks what is kept, every other one sends it."""
    exchange = Exchange(2)
    exchange.warm_up({SPECS[name] for name in EXACT})
    buckets: tuple[Bucket, ...] = make_buckets({"a": 5000, "b": 700}, {"tiny": 40, "c": 3001})
    books = Books(exchange, numels_of(buckets))
    told = Told([], [], [])
    for number, choice in enumerate(choices()):
        strategy = strategy_of(buckets, TWO_BY_TWO, choice, partition_bytes=(0, 8192)[number % 2])
        plain = Assignment(strategy, drain=number % 2 == 0)
        in_order = planned(plain, buckets)
        for step in range(STEPS_EACH):
            mine = integers(buckets, rank, NUM_RANKS, draw=number * STEPS_EACH + step)
            books.step(plain if number % 4 == 3 else in_order, buckets, mine)
        if number % 10 == 9:
            told.ledgers.append(copied(books.ledger()))
            exchange.script.records.clear()
            told.in_use_kb.append(_in_use_kb())
        told.kept_bytes.append(exchange.store.num_bytes)
    # Two plain steps that send everything: then nothing is kept.
    drain = planned(Assignment(strategy_of(buckets, TWO_BY_TWO, PLAIN)), buckets)
    for step in range(2):
        books.step(drain, buckets, integers(buckets, rank, NUM_RANKS, draw=9000 + step))
    told.ledgers.append(books.ledger())
    told.kept_bytes.append(exchange.store.num_bytes)
    exchange.close()
    return told


@pytest.mark.slow
def test_a_hundred_switches_lose_nothing():
    told = POOL.run(switch, deadline_s=120)
    for ledgers in zip(*(each.ledgers for each in told), strict=True):
        assert all(ledger.digests == ledgers[0].digests for ledger in ledgers)
        assert imbalance(ledgers) == 0.0
    middle = [each.ledgers[4] for each in told]
    assert imbalance(middle, residuals=0.0) > 0  # the check sees a residual that is missing
    assert max(ledger.norm for ledger in middle) > 0
    for each in told:
        assert each.kept_bytes[-1] == 0
        assert max(each.kept_bytes[SETTLED:]) <= max(each.kept_bytes[:SETTLED])
        assert each.in_use_kb[-1] <= max(each.in_use_kb[: SETTLED // 10]) + MORE_KB
