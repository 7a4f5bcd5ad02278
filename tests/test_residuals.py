"""The residual store: transactions, moves between plans, what is carried. One process, by hand."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import exchange
from espresso.comm.keep.store import ResidualStore
from espresso.comm.memory import HostMemory
from espresso.compressors import DrawKey
from espresso.strategies import Run, Site

NUMELS = {"a": 100, "b": 50}


def run(tensor: str, start: int, numel: int) -> Run:
    return Run(tensor, start, 0, 0, numel)


def write(residual, values) -> None:
    """What an encoder does during an iteration: values for the runs, one after the other."""
    buffer = residual.feedback(np.array(residual.starts)).new
    values = np.broadcast_to(values, sum(r.numel for r in residual.runs))
    position = 0
    for r, start in zip(residual.runs, residual.starts, strict=True):
        buffer[start : start + r.numel] = values[position : position + r.numel]
        position += r.numel
    residual.settle(DrawKey())


def kept_by(residual) -> list[float]:
    """What a residual holds, run after run, without the gaps that align them."""
    parts = [residual.old[s : s + r.numel] for r, s in zip(residual.runs, residual.starts, strict=True)]
    return np.concatenate(parts).tolist()


def make(store, site, *runs, replica=0):
    return store.new_residual(site, runs, np.float32, replica)


def held(store) -> dict[str, np.ndarray]:
    """Everything replica 0 answers for, by tensor."""
    return exchange.kept_by(store, NUMELS)


def filled(*runs, site=Site.LOCAL, replica=0):
    """A store with one residual that holds 1, 2, 3 …"""
    store = ResidualStore()
    residual = make(store, site, *runs, replica=replica)
    store.adopt([residual], NUMELS)
    write(residual, np.arange(1, sum(r.numel for r in runs) + 1))
    store.commit()
    return store, residual


def test_every_run_begins_on_a_cache_line_and_is_found_by_its_place_in_the_group():
    residual = ResidualStore().new_residual(Site.LOCAL, [Run("a", 0, 64, 0, 10), Run("b", 5, 74, 0, 33)], np.float32, 0)
    assert residual.starts == (0, 16)
    residual.begin()
    assert residual.old.size == 16 + 33
    assert [residual.locate(at) for at in (64, 73, 74, 106)] == [0, 9, 16, 48]


# Transactions


def test_a_commit_keeps_what_was_written():
    store, residual = filled(run("a", 0, 100))
    assert held(store)["a"].tolist() == list(range(1, 101))
    assert not residual.written


def test_a_discard_keeps_what_was_there_before():
    store, residual = filled(run("a", 0, 100))
    before = residual.old
    write(residual, 7.0)
    store.discard()
    assert residual.old is before
    assert held(store)["a"].tolist() == list(range(1, 101))
    store.commit()  # nothing was written since: the discarded values must not come back
    assert held(store)["a"].tolist() == list(range(1, 101))


def test_a_residual_that_was_not_written_stays():
    store, residual = filled(run("a", 0, 100))
    residual.feedback(np.array(residual.starts)).new[:] = 9.0
    store.commit()
    assert held(store)["a"].tolist() == list(range(1, 101))


def test_without_transactions_there_is_one_buffer():
    careful, frugal = ResidualStore(), ResidualStore(transactional=False)
    for store in (careful, frugal):
        store.adopt([make(store, Site.LOCAL, run("a", 0, 100))], NUMELS)
    assert careful.num_bytes == 2 * frugal.num_bytes == 800


@pytest.mark.parametrize("storage", ["float32", "bf16"])
def test_without_transactions_no_inf_stays(storage):
    """Or it came with the next gradient, and with all after it."""
    store = ResidualStore(transactional=False, storage=storage)
    residual = make(store, Site.LOCAL, run("a", 0, 100))
    store.adopt([residual], NUMELS)
    feedback = residual.feedback(np.array(residual.starts))
    feedback.new[:] = 2.0
    feedback.new[3:6] = np.inf, -np.inf, np.nan
    residual.settle(DrawKey())
    store.discard()
    kept = held(store).get("a", np.zeros(100))
    assert np.isfinite(kept).all()
    if storage == "float32":  # packed, all that was packed with them is lost
        assert kept.tolist() == [2.0] * 3 + [0.0] * 3 + [2.0] * 94


def test_norm_and_emptiness():
    store = ResidualStore()
    assert not store.lend()
    assert store.norm() == 0
    store, _ = filled(run("a", 0, 2))
    store.add_carry("b", 0, np.array([2.0], np.float32), 50)
    assert store.lend()
    assert store.norm() == pytest.approx(3.0)


# Moves


def test_the_same_site_keeps_its_values_when_it_is_cut_elsewhere():
    store, _ = filled(run("a", 0, 100), run("b", 0, 50))
    parts = [
        make(store, Site.LOCAL, run("b", 0, 50), run("a", 60, 40)),
        make(store, Site.LOCAL, run("a", 0, 60)),
    ]
    store.adopt(parts, NUMELS)
    assert kept_by(parts[0]) == [*range(101, 151), *range(61, 101)]
    assert kept_by(parts[1]) == list(range(1, 61))
    assert not store.carry


def test_a_residual_of_the_same_place_inherits_the_buffers_and_leaves_loans_alone():
    store, residual = filled(run("a", 0, 10), run("b", 3, 7))
    buffer, loan = residual.old, store.lend()[0]
    fresh = make(store, Site.LOCAL, run("a", 0, 10), run("b", 3, 7))
    other = make(store, next(site for site in Site if site is not Site.LOCAL), run("a", 0, 10))
    store.adopt([other, fresh], NUMELS)
    assert fresh.old is buffer
    assert kept_by(fresh) == list(range(1, 18))
    assert not store.carry
    for value in (30, 40):
        write(fresh, value)
        store.commit()
    assert kept_by(fresh) == [40] * 17
    assert loan.read().tolist() == list(range(1, 11)), "as it was when it was lent"


@pytest.mark.parametrize("change", [{"gain": 0.5}, {"replica": 1}, {"dtype": np.float64}])
def test_what_is_kept_in_another_way_inherits_nothing(change):
    store, residual = filled(run("a", 0, 10))
    how = {"dtype": np.float32, "replica": 0, "gain": 1.0} | change
    fresh = store.new_residual(Site.LOCAL, [run("a", 0, 10)], how["dtype"], how["replica"], gain=how["gain"])
    buffer = residual.old
    store.adopt([fresh], NUMELS)
    assert fresh.old is not buffer
    assert fresh.read(0, 10).tolist() == list(range(1, 11))


def test_what_finds_no_place_is_carried():
    store, _ = filled(run("a", 20, 40), site=Site.INTER_FIRST)
    residual = make(store, Site.INTER_FIRST, run("a", 30, 10))
    store.adopt([residual], NUMELS)
    assert kept_by(residual) == list(range(11, 21))
    wanted = np.zeros(100)
    wanted[20:60] = np.arange(1, 41)
    wanted[30:40] = 0
    assert store.carry["a"].tolist() == wanted.tolist()


@pytest.mark.parametrize("site", [site for site in Site if site is not Site.LOCAL])
def test_another_site_is_another_address(site):
    other = next(s for s in Site if s not in (site, Site.LOCAL))
    store, _ = filled(run("a", 0, 100), site=site)
    residual = make(store, other, run("a", 0, 100))
    store.adopt([residual], NUMELS)
    assert not residual.old.any()
    assert store.carry["a"].tolist() == list(range(1, 101))


@pytest.mark.parametrize("site", [site for site in Site if site is not Site.LOCAL])
def test_a_local_site_takes_what_has_no_place_of_its_own(site):
    """It encodes this rank's own contribution; of a replicated residual only the first replica's."""
    for replica, taken in ((0, True), (1, False)):
        store, _ = filled(run("a", 0, 100), site=site, replica=replica)
        local = make(store, Site.LOCAL, run("a", 0, 60))
        kept = make(store, site, run("a", 20, 80), replica=replica)
        store.adopt([local, kept], NUMELS)
        assert kept_by(kept) == list(range(21, 101))
        assert kept_by(local) == ([*range(1, 21)] if taken else [0] * 20) + [0] * 40
        assert not store.carry


def test_a_move_never_needs_buffers_of_both_plans():
    """Two buffers of each residual, what is being moved, and not those of the old plan beside those of the new one."""
    numels = {f"t{i}": 100_000 for i in range(8)}
    store = ResidualStore()
    plans = [[make(store, Site.LOCAL, run(name, 0, numel)) for name, numel in numels.items()] for _ in range(2)]
    tracemalloc.start()
    try:
        store.adopt(plans[0], numels)
        for residual in store.live:
            write(residual, np.arange(residual.size))
        store.commit()
        in_use = store.num_bytes
        tracemalloc.reset_peak()
        store.adopt(plans[1], numels)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert in_use == 8 * 100_000 * 8
    assert kept_by(plans[1][3]) == list(range(100_000))
    assert peak < 1.8 * in_use


class Full(HostMemory):
    """No room for anything."""

    def zeros(self, shape, dtype):
        raise MemoryError


def test_a_move_for_which_there_is_no_memory_loses_nothing():
    store, _ = filled(run("a", 0, 100))
    with pytest.raises(MemoryError):
        store.adopt([store.new_residual(Site.LOCAL, [run("a", 0, 100)], np.float32, 0, Full())], NUMELS)
    pieces, _ = exchange.snapshot(store)
    ((start, values, _),) = pieces["a", Site.LOCAL]
    assert (start, values.tolist()) == (0, list(range(1, 101)))
    residual = make(store, Site.LOCAL, run("a", 0, 100))
    store.adopt([residual], NUMELS)
    assert kept_by(residual) == list(range(1, 101))


def test_what_is_carried_goes_to_a_local_site_once_there_is_one():
    store, _ = filled(run("a", 0, 100), site=Site.FLAT_SECOND)
    store.adopt([], NUMELS)
    residual = make(store, Site.LOCAL, run("a", 0, 60))
    store.adopt([residual], NUMELS)
    assert kept_by(residual) == list(range(1, 61))
    assert store.carry["a"].tolist() == [0] * 60 + list(range(61, 101))


def test_only_the_first_replica_carries():
    for replica, carried in ((0, True), (1, False)):
        store, _ = filled(run("a", 0, 100), site=Site.INTRA_SECOND, replica=replica)
        kept = make(store, Site.INTRA_SECOND, run("a", 0, 50), replica=replica)
        store.adopt([kept], NUMELS)
        assert kept_by(kept) == list(range(1, 51))  # every replica keeps what stays in place
        assert bool(store.carry) is carried


def test_a_carry_that_went_into_an_iteration_is_forgotten_by_its_commit_only():
    store = ResidualStore()
    store.waits = True
    store.add_carry("a", 10, np.ones(5, np.float32), 100)
    store.used_carry("a", 0, 100)
    store.discard()
    store.commit()
    assert store.carry["a"].sum() == 5
    store.used_carry("a", 0, 12)
    store.used_carry("a", 12, 2, np.full(2, 0.5, np.float32))
    store.commit()
    assert store.carry["a"][10:15].tolist() == [0, 0, 0.5, 0.5, 1]
    assert store.unsent == {"a"}
    store.used_carry("a", 0, 100, np.full(100, 0.5, np.float32))
    store.commit()
    assert (store.carry["a"].sum(), store.unsent) == (50, set()), "what a type rounds off was sent as far as it goes"
    store.used_carry("a", 0, 100)
    store.commit()
    assert not store.carry


def test_zeros_are_not_carried():
    store = ResidualStore()
    store.add_carry("a", 0, np.zeros(10, np.float32), 100)
    assert not store.carry


def test_one_bucket_of_a_changing_structure_moves_alone():
    store, first = filled(run("a", 0, 100))
    second = make(store, Site.LOCAL, run("b", 0, 50))
    store.adopt([second], NUMELS, only={"b"})
    assert store.holds([first, second])
    write(second, 5.0)
    store.commit()
    third = make(store, Site.LOCAL, run("b", 0, 20))
    store.adopt([third], NUMELS, only={"b"})
    assert store.holds([first, third])
    assert not store.holds([second])
    assert kept_by(third) == [5.0] * 20
    assert store.carry["b"].tolist() == [0.0] * 20 + [5.0] * 30
    assert held(store)["a"].tolist() == list(range(1, 101))


def test_a_residual_that_also_holds_other_tensors_loses_nothing_when_replaced():
    store, _ = filled(run("a", 0, 100), run("b", 0, 50))
    store.adopt([make(store, Site.LOCAL, run("b", 0, 50))], NUMELS, only={"b"})
    assert held(store)["b"].tolist() == list(range(101, 151))
    assert held(store)["a"].tolist() == list(range(1, 101))


# Saving and loading


def test_a_snapshot_is_a_copy():
    store, residual = filled(run("a", 0, 100))
    pieces, _ = exchange.snapshot(store)
    residual.old[:] = 0
    assert pieces["a", Site.LOCAL][0][1].tolist() == list(range(1, 101))


def test_loaded_pieces_wait_for_the_plan_that_keeps_their_tensor():
    store, _ = filled(run("a", 0, 100), run("b", 0, 50))
    other = ResidualStore()
    other.load(*exchange.snapshot(store), NUMELS)
    assert other.lend()
    assert held(other)["a"].tolist() == held(store)["a"].tolist()
    residual = make(other, Site.LOCAL, run("a", 0, 100))
    other.adopt([residual], NUMELS, only={"a"})
    assert kept_by(residual) == list(range(1, 101))
    assert held(other)["b"].tolist() == held(store)["b"].tolist()  # still waiting


def test_loading_replaces_what_is_there():
    saved, _ = filled(run("a", 0, 100))
    store, residual = filled(run("a", 0, 100))
    write(residual, 1e6)
    store.commit()
    store.add_carry("b", 0, np.ones(50, np.float32), 50)
    store.load(*exchange.snapshot(saved), NUMELS)
    assert kept_by(residual) == list(range(1, 101))
    assert not store.carry


# Any sequence of plans keeps the sum


@st.composite
def plans(draw):
    """Residuals of one plan: disjoint ranges of both tensors at any sites."""
    rows = []
    for tensor, numel in NUMELS.items():
        for site in draw(st.lists(st.sampled_from(list(Site)), max_size=2, unique=True)):
            cuts = sorted(draw(st.sets(st.integers(0, numel), min_size=2, max_size=4)))
            rows += [(site, tensor, low, high - low) for low, high in pairwise(cuts)]
    return rows


@given(st.lists(st.tuples(plans(), st.booleans()), max_size=5))
def test_any_sequence_of_plans_keeps_the_sum(sequence):
    store, _ = filled(run("a", 0, 100), run("b", 0, 50))
    wanted = held(store)
    for rows, alone in sequence:
        only = {"a"} if alone else None
        chosen = [row for row in rows if only is None or row[1] in only]
        store.adopt([make(store, site, run(t, low, n)) for site, t, low, n in chosen], NUMELS, only=only)
        for name, values in held(store).items():
            assert values.tolist() == wanted[name].tolist()
