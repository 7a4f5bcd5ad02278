"""Residuals kept in 16 or 8 bits: what the rounding loses, and nothing else."""

from __future__ import annotations

import logging
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from compressor_cases import numbers

from benchmarks.exchange import Exchange, make_buckets, numels_of, snapshot, strategy_of
from benchmarks.rank_pool import POOL
from espresso import EspressoState
from espresso.comm.execute.executor import Assignment
from espresso.comm.keep.residual import _Packer
from espresso.comm.keep.store import ResidualStore
from espresso.compressors import create, host_codec
from espresso.compressors.base import Decoding, DrawKey, Encoding, Segment
from espresso.strategies import RESIDUAL_DTYPES, Choice, CompressorSpec, Run, Site, parse_option
from tests.test_conservation import SHAPES, SIZES, TWO_BY_TWO, Books, check_replicas, imbalance

RUNS = (Run("a", 0, 0, 0, 1000), Run("b", 5, 1000, 1000, 301))


def bound(storage: str, left: np.ndarray, starts: tuple[int, ...]) -> np.ndarray:
    """What a rounding of ``left`` may lose."""
    if storage == "float32":
        return np.zeros(left.size)
    if storage == "bf16":
        return 2.0**-7 * np.abs(left)
    lost = np.zeros(left.size)
    for run, start in zip(RUNS, starts, strict=True):
        for low in range(start, start + run.numel, 256):
            block = slice(low, min(low + 256, start + run.numel))
            lost[block] = np.abs(left[block]).max() / 126
    return lost


@pytest.mark.parametrize("storage", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("transactional", [True, False])
def test_the_law_holds_up_to_what_is_stated(storage: str, transactional: bool) -> None:
    """sum sent + e_T + sum r_t = sum given, r_t within its bound in every step."""
    store = ResidualStore(transactional=transactional, storage=storage)
    residual = store.new_residual(Site.LOCAL, RUNS, np.float32, 0)
    store.adopt([residual], {"a": 1000, "b": 306})
    starts = np.array(residual.starts)
    codec = host_codec(create("topk:raw_below=1,ratio=0.05"))
    layout = codec.compressor.layout([Segment(r.tensor, r.tensor_start, r.numel) for r in RUNS])
    size = residual.starts[1] + 301
    payload, out = np.zeros((1, layout.num_bytes), np.uint8), np.zeros(size, np.float32)
    balance, rounded = np.zeros(size), 0.0
    for step in range(20):
        gradient = numbers(size, np.float32, step)
        before = residual.old
        feedback = residual.feedback(starts)
        codec.encode(Encoding(layout, gradient, starts, feedback=feedback), payload[0])
        codec.decode(Decoding(layout, out, starts), payload)
        left = feedback.new.copy()
        residual.settle(DrawKey(step=step))
        store.commit()
        lost = (left - residual.old)[residual_places(residual.starts)]
        assert (np.abs(lost) <= bound(storage, left, residual.starts)[residual_places(residual.starts)]).all()
        rounded += float(np.abs(lost).sum())
        inside = residual_places(residual.starts)
        q = (gradient + before)[inside]
        assert np.array_equal(q, (out + left)[inside])
        balance[inside] += lost
    assert (rounded > 0) is (storage != "float32")
    full = ResidualStore(transactional=transactional)
    full.adopt([full.new_residual(Site.LOCAL, RUNS, np.float32, 0)], {"a": 1000, "b": 306})
    share = store.num_bytes / full.num_bytes
    assert share < {"float32": 1.01, "bf16": 0.6, "int8": 0.35}[storage]


def residual_places(starts: tuple[int, ...]) -> np.ndarray:
    """Elements of the buffers that belong to runs."""
    return np.concatenate([np.arange(s, s + r.numel) for s, r in zip(starts, RUNS, strict=True)])


@pytest.mark.parametrize("storage", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_steady_gradient_is_not_lost_in_the_rounding(storage: str, dtype: type) -> None:
    """What is added is a thousandth of what is kept, less than half of what narrow numbers are apart there."""
    size, steps = 1024, 1000
    store = ResidualStore(storage=storage, gain=1 / 16)
    residual = store.new_residual(Site.LOCAL, (Run("a", 0, 0, 0, size),), dtype, 0)
    store.adopt([residual], {"a": size})
    starts, codec = np.array(residual.starts), host_codec(create("topk:ratio=0.01"))
    layout = codec.compressor.layout([Segment("a", 0, size)], dtype)
    payload, out = np.zeros((1, layout.num_bytes), np.uint8), np.zeros(size, dtype)
    gradient, sent = np.exp(numbers(size, dtype)), np.zeros(size)
    for step in range(steps):
        encoding = Encoding(layout, gradient, starts, feedback=residual.feedback(starts))
        codec.encode(encoding, payload[0])
        codec.decode(Decoding(layout, out, starts), payload)
        residual.settle(DrawKey(step=step))
        store.commit()
        sent += out
    given = steps * gradient.astype(np.float64)
    lost = np.linalg.norm(sent + residual.read(0, size) - given) / np.linalg.norm(given)
    assert 0 < lost < {"bf16": 0.05, "int8": 0.1}[storage]


@pytest.mark.parametrize("storage", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_nothing_is_added_to_stays_as_it_is(storage: str, dtype: type) -> None:
    """Of a tensor that is not used, of rows that no example had: for thousands of steps."""
    store = ResidualStore(storage=storage)
    residual = store.new_residual(Site.LOCAL, RUNS, dtype, 0)
    store.adopt([residual], {"a": 1000, "b": 306})
    residual.old = np.exp2(np.round(4 * numbers(residual.old.size, dtype)))
    residual.old[:300] = numbers(300, dtype)
    kept = residual.old
    for step in range(5):
        feedback = residual.feedback(np.array(residual.starts))
        feedback.new[:] = feedback.old
        residual.settle(DrawKey(step=step))
        store.commit()
    inside = residual_places(residual.starts)
    assert np.array_equal(residual.old[inside], kept[inside])


@pytest.mark.parametrize("storage", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_factors_near_one_are_not_lost_in_the_rounding(storage: str, dtype: type) -> None:
    """As a learning rate's schedule has them: a thousandth is less than half of what bf16 numbers are apart."""
    store = ResidualStore(storage=storage)
    residual = store.new_residual(Site.LOCAL, RUNS, dtype, 0)
    store.adopt([residual], {"a": 1000, "b": 306})
    residual.old = numbers(residual.old.size, dtype)
    before = residual.old
    for _ in range(700):
        store.rescale({"a": 1 / 1.001})
    assert np.linalg.norm(residual.old[:1000]) == pytest.approx(1.001**-700 * np.linalg.norm(before[:1000]), rel=0.01)
    assert np.array_equal(residual.old[1000:][-301:], before[1000:][-301:])


def test_a_factor_is_rounded_alike_on_replicas_and_anew_each_time() -> None:
    def kept(key: DrawKey, times: int) -> np.ndarray:
        store = ResidualStore(storage="bf16")
        residual = store.new_residual(Site.INTRA_SECOND, (Run("a", 0, 0, 0, 4000),), np.float32, 0)
        store.adopt([residual], {"a": 4000})
        residual.feedback(np.array(residual.starts)).new[:] = 1.0
        residual.settle(key)
        store.commit()
        heir = store.new_residual(Site.INTRA_SECOND, (Run("a", 0, 0, 0, 4000),), np.float32, 0)
        store.adopt([heir], {"a": 4000})  # a plan that keeps the same there
        for _ in range(times):
            store.rescale({"a": 1.0 + 2.0**-8})  # half way to the next
        return heir.old

    once, twice = (kept(DrawKey(seed=5, step=3), times) for times in (1, 2))
    assert np.array_equal(once, kept(DrawKey(seed=5, step=3), 1))
    assert 1500 < (once == kept(DrawKey(seed=5, step=3, rank=0), 1)).sum() < 2500
    assert 1500 < (once > 1).sum() < 2500
    # Of those that went up, half go up again.
    assert 0.4 < (twice > 1 + 2.0**-7)[once > 1].mean() < 0.6
    assert 0.4 < (twice > 1)[once == 1].mean() < 0.6


@pytest.mark.parametrize("storage", ["bf16", "int8"])
def test_a_discarded_iteration_leaves_every_bit(storage: str) -> None:
    store = ResidualStore(storage=storage)
    residual = store.new_residual(Site.LOCAL, RUNS, np.float32, 0)
    store.adopt([residual], {"a": 1000, "b": 306})
    residual.old = numbers(residual.old.size, np.float32)
    before = residual.old
    residual.feedback(np.array(residual.starts)).new[:] = np.nan
    residual.settle(DrawKey())
    store.discard()
    assert np.array_equal(residual.old, before)
    other = ResidualStore(storage=storage)
    pieces, carry = snapshot(store)
    other.load(pieces, carry, {"a": 1000, "b": 306})
    fresh = other.new_residual(Site.LOCAL, RUNS, np.float32, 0)
    other.adopt([fresh], {"a": 1000, "b": 306})
    places = residual_places(residual.starts)
    again = fresh.old[places]
    assert np.abs(again - before[places]).max() <= (0 if storage == "bf16" else np.abs(before).max() * 1e-6)


@pytest.mark.parametrize("storage", ["float32", "bf16", "int8"])
def test_of_what_a_discarded_iteration_overwrote_only_what_is_not_finite_goes(storage: str) -> None:
    store = ResidualStore(storage=storage, transactional=False)
    residual = store.new_residual(Site.LOCAL, RUNS, np.float32, 0)
    store.adopt([residual], {"a": 1000, "b": 306})
    written = residual.feedback(np.array(residual.starts)).new
    written[:] = np.random.default_rng(0).uniform(0.5, 1.0, written.size)
    written[[3, 700]] = np.nan, np.inf
    residual.settle(DrawKey())
    store.discard()
    places = residual_places(residual.starts)
    assert [int(at) for at in places if residual.old[at] == 0] == [3, 700]


@pytest.mark.parametrize("storage", ["float32", "bf16", "int8"])
def test_what_a_step_holds_for_a_later_one_is_not_its_neighbours(storage: str) -> None:
    """A compressor of several rounds writes in two steps; other residuals are opened between them."""
    store = ResidualStore(storage=storage)
    mine, other = (store.new_residual(Site.LOCAL, RUNS, np.float32, 0) for _ in range(2))
    mine.begin()
    other.begin()
    at = np.array(mine.starts)
    mine.old = numbers(mine.size, np.float32)
    kept = mine.old.copy()
    inside = residual_places(mine.starts)
    written = numbers(mine.size, np.float32, 1)
    mine.feedback(at).new[:] = written
    mine.hold()
    for buffer in (other.feedback(at).old, other.feedback(at).new):
        buffer[:] = 7
    other.settle(DrawKey())
    again = mine.feedback(at)
    assert np.array_equal(again.old[inside], kept[inside])
    assert np.array_equal(again.new[inside], written[inside])
    mine.settle(DrawKey())
    mine.commit()
    assert (np.abs(mine.old - written) <= bound(storage, written, mine.starts))[inside].all()


def test_the_budget_is_reported_and_wrong_settings_are_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "espresso"):
        store = ResidualStore(storage="bf16")
        store.adopt([store.new_residual(Site.LOCAL, RUNS, np.float32, 0)], {"a": 1000, "b": 306})
    assert "residuals take 0.01 MiB on this rank (bf16, both buffers of each)" in caplog.text
    with pytest.raises(ValueError, match="residual_dtype must be one of float32, bf16, int8, got 'fp4'"):
        EspressoState("topk", residual_dtype="fp4")


def run_stored(rank: int, storage: str) -> object:
    close, draws = _Packer.close, list[DrawKey]()

    def noted(packer: _Packer, payload: np.ndarray, key: DrawKey, **how: bool) -> None:
        draws.append(key)
        close(packer, payload, key, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Packer, "close", noted)
        return run_exchange(rank, storage), draws


def run_exchange(rank: int, storage: str) -> object:
    exchange = Exchange(2)
    exchange.warm_up({"topk:ratio=0.05"})
    exchange.store.storage = storage
    buckets = make_buckets(*SIZES)
    choice = Choice(parse_option(SHAPES["three sites"]), CompressorSpec.parse("topk:ratio=0.05"))
    assignment = Assignment(strategy_of(buckets, TWO_BY_TWO, choice, partition_bytes=8192))
    books = Books(exchange, numels_of(buckets))
    for step in range(6):
        random = np.random.default_rng([step, rank])
        mine = [torch.from_numpy(random.standard_normal(b.numel).astype(np.float32)) for b in buckets]
        books.step(assignment, buckets, mine)
    exchange.close()
    return books.ledger()


@pytest.mark.parametrize(("storage", "allowed"), [("bf16", 0.3), ("int8", 0.6)])
def test_the_executor_keeps_narrow_residuals_at_every_site(storage: str, allowed: float) -> None:
    """Six steps at three sites of four ranks: the imbalance is that of roundings, far below what is kept."""
    ledgers, draws = zip(*POOL.run(run_stored, storage), strict=True)
    check_replicas(ledgers)
    for rank, keys in enumerate(draws):
        assert len({key.step for key in keys}) == 6
        assert {key.rank for key in keys} == {rank}
    assert 0 < imbalance(ledgers) < allowed
    assert imbalance(ledgers, residuals=0.0) > 5 * allowed


@pytest.mark.parametrize("storage", ["float32", "bf16", "int8"])
@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize("gain", [1.0, 0.25])
def test_what_is_lent_stays_as_it_was(storage: str, transactional: bool, gain: float) -> None:
    """Whatever happens to the residual meanwhile: iterations, pieces that are added, another scale, an end."""
    store = ResidualStore(transactional=transactional, storage=storage, gain=gain)
    residual = store.new_residual(Site.LOCAL, RUNS, np.float32, 0)
    store.adopt([residual], {"a": 1000, "b": 306})
    residual.old = numbers(residual.old.size, np.float32)

    def iterate() -> None:
        residual.feedback(np.array(residual.starts)).new[:] = 3.0
        residual.settle(DrawKey())
        store.commit()

    changes = (
        iterate,
        lambda: (iterate(), iterate(), iterate()),
        lambda: residual.add([(0, np.ones(5, np.float32))]),
        lambda: store.rescale({"a": 0.5}),
        lambda: store.load({}, {}, {}),
    )
    for change in changes:
        lent = store.lend()
        before = [stretch.read().tobytes() for stretch in lent]
        change()
        assert [stretch.read().tobytes() for stretch in lent] == before
        assert [stretch.read().tobytes() for stretch in store.lend()] != before
        residual.old = numbers(residual.old.size, np.float32, 9)


def test_lending_copies_nothing_and_costs_a_buffer_only_as_long_as_it_is_held() -> None:
    store = ResidualStore()
    residual = store.new_residual(Site.LOCAL, RUNS, np.float32, 0)
    store.adopt([residual], {"a": 1000, "b": 306})
    starts = np.array(residual.starts)

    def buffers_now() -> set[int]:
        feedback = residual.feedback(starts)
        return {id(feedback.old), id(feedback.new)}

    buffers, kept = buffers_now(), id(residual.old)
    lent = store.lend()
    assert {id(stretch.loan.kept) for stretch in lent} == {kept}
    for _ in range(3):
        residual.feedback(starts).new[:] = 3.0
        residual.settle(DrawKey())
        store.commit()
    assert len(buffers_now() & buffers) == 1, "the one that is lent is in no use"
    del lent
    buffers = buffers_now()
    store.lend()
    for _ in range(3):
        residual.feedback(starts).new[:] = 3.0
        residual.settle(DrawKey())
        store.commit()
    assert buffers_now() == buffers


def test_one_residual_after_another_is_unpacked_to_look_at_stretches(monkeypatch):
    """All of them together are as large as the gradients."""
    store = ResidualStore(storage="bf16")
    residuals = [store.new_residual(Site.LOCAL, (Run(name, 0, 0, 0, 300),), np.float32, 0) for name in "abc"]
    store.adopt(residuals, dict.fromkeys("abc", 300))
    unpacked, alive, plain = [], [], _Packer.unpacked

    def watched(self, payload):
        alive.append(sum(each() is not None for each in unpacked))
        values = plain(self, payload)
        unpacked.append(weakref.ref(values))
        return values

    monkeypatch.setattr(_Packer, "unpacked", watched)
    kept = store.kept({name: np.arange(10, 20) for name in "abc"})
    assert alive == [0, 0, 0]
    assert all(values.shape == (10,) for values in kept.values())


def run_each_its_own(rank: int, turns: int) -> tuple[object, int]:
    """Tensors of which neighbours keep their residuals differently; ``turns`` times all change to the next way."""
    exchange, spec = Exchange(2), CompressorSpec.parse("topk:ratio=0.05")
    exchange.warm_up({str(spec)})
    buckets = make_buckets({"a": 5000, "b": 7000}, {"c": 6000})
    base = strategy_of(buckets, TWO_BY_TWO, Choice(parse_option(SHAPES["three sites"]), spec), partition_bytes=8192)
    books = Books(exchange, numels_of(buckets))
    for turn in range(turns + 1):
        choices = {
            name: replace(choice, compressor=spec.kept_as(RESIDUAL_DTYPES[(place + turn) % 3]))
            for place, (name, choice) in enumerate(base.choices.items())
        }
        assignment = Assignment(base.with_choices(choices))
        for step in range(3):
            random = np.random.default_rng([turn, step, rank])
            mine = [torch.from_numpy(random.standard_normal(b.numel).astype(np.float32)) for b in buckets]
            books.step(assignment, buckets, mine)
    exchange.close()
    return books.ledger(), exchange.store.num_bytes


def test_tensors_keep_their_residuals_as_their_compressors_say() -> None:
    """Those in full lose nothing, whatever their neighbours do; a change of plan moves all of them over."""
    found = POOL.run(run_each_its_own, 0)
    ledgers = [ledger for ledger, _ in found]
    check_replicas(ledgers)
    off = {name: imbalance([replace(one, averages={name: one.averages[name]}) for one in ledgers]) for name in "abc"}
    assert off["a"] < 1e-4, "in full"
    assert 1e-4 < off["b"] < 0.3, "bf16"
    assert 1e-3 < off["c"] < 0.6, "int8"
    assert imbalance(ledgers, residuals=0.0) > 3.0
    moved = [ledger for ledger, _ in POOL.run(run_each_its_own, 3)]
    check_replicas(moved)
    assert imbalance(moved) < 1.2
    assert imbalance(moved, residuals=0.0) > 3.0
