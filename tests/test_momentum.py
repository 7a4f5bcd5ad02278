"""Momentum in front of error feedback: DGC's correction, masking, clipping and warm-up against the paper's formulas in
NumPy, and the same momentum before every other family."""

from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.exchange import Exchange, integers, make_buckets, numels_of, planned, strategy_of
from espresso.comm.errors import DisagreementError
from espresso.comm.execute.executor import Assignment
from espresso.comm.parameter_server.plain import is_plain, smaller
from espresso.compressors import Correction, Decoding, DrawKey, Encoding, Feedback, Segment, create, host_codec
from espresso.compressors.momentum import HostMover
from espresso.compressors.schedule import REMIND_AFTER, Follower, Schedule, translate
from espresso.strategies import (
    NONE,
    PLAIN,
    Bucket,
    Choice,
    Cluster,
    CompressorSpec,
    Site,
    Strategy,
    TensorSpec,
    parse_option,
)
from tests.ddp import ALLGATHER, SHARDED, Played, agreed, batch, mlp, registered, sgd, wrap

TWO = Cluster(2, 1)
SIZES = ({"a": 3000, "b": 700}, {"tiny": 40, "c": 1501})
RAW = ("b",)
DGC = "dgc:ratio=0.05"
ON_SUMS = "flat.reduce_scatter > comp > flat.allgather > dec"
STEPS = 6
MU = 0.75
MOST_STEPS = 300
SUMMED = "comp > flat.allreduce > dec"
FAMILIES = {
    "efsignsgd:block=64": ALLGATHER,
    "onebit": SHARDED,
    "twobit": SHARDED,
    "int8": ALLGATHER,
    "int4": ALLGATHER,
    "randomk:k=300": SUMMED,
    "threshold": ALLGATHER,
    "stc": ALLGATHER,
    "fp16": SUMMED,
}

RULES = {
    "plain": Correction(MU),
    "nesterov": Correction(MU, nesterov=True),
    "clipped": Correction(MU, clip_norm=20.0),
}


@pytest.mark.parametrize("how", RULES)
def test_training_follows_the_papers_formulas(played, how):
    """Averages, residuals and velocities of both ranks after every step, raw tensors and small segments included."""
    for rank, result in enumerate(played(against_the_oracle)):
        assert result[how]["averages"] < 2e-5, f"rank {rank}"
        assert result[how]["residuals"] < 2e-5, f"rank {rank}"
        assert result[how]["velocities"] < 2e-5, f"rank {rank}"
        assert result[how]["masked"] > 0, "momentum factor masking never happened"
        assert result[how]["without masking"] > 1e-3, "the check does not see masking"


def test_momentum_comes_before_the_feedback_of_every_family(played):
    """Nesterov's form, no masking: what was sent plus what is kept equals what the momentum gave."""
    for results in played(every_family):
        for spec, (missing, kept, most) in results.items():
            assert missing <= 2e-3 * most, spec
            assert (kept > 0) == (not spec.startswith("fp16")), spec


def test_what_goes_to_a_server_as_plain_numbers_is_masked_nowhere():
    """A payload that would be larger: whatever the compressor masks otherwise, as on a GPU."""
    segments = [Segment("a", 0, 40)]
    codec = smaller(host_codec(create("dgc:ratio=0.9,raw_below=1")), segments, np.float32)
    layout = codec.compressor.layout(segments, np.float32)
    assert is_plain(codec)
    velocity = Feedback(np.zeros(40, np.float32), np.ones(40, np.float32), np.zeros(1, np.int64))
    HostMover().mask(codec.compressor, layout, np.zeros(layout.num_bytes, np.uint8), velocity)
    assert (velocity.new == 1).all()


def test_only_the_first_site_has_a_velocity(played):
    for sites in played(velocity_sites):
        assert sites[SHARDED] == {"local"}
        assert sites[ON_SUMS] == {"flat_second"}


def test_a_ratio_of_one_is_plain_averaging_on_every_shape(played):
    """Everything is sent and masked in every step, so that the velocity never outlives one."""
    for errors in played(everything_sent):
        assert errors == {ALLGATHER: 0.0, SHARDED: 0.0, ON_SUMS: 0.0}


def test_velocities_survive_another_plan(played):
    """From raw to local to sums and back, buckets rebuilt: the mean velocity is that of unbroken momentum."""
    for error, moving in played(replanned):
        assert moving > 1.0
        assert error < 1e-5


@pytest.mark.parametrize("how", ["plain", "nesterov"])
def test_a_velocity_gives_as_much_on_every_plan(played, how):
    """What was sent, is owed, and will come of velocities is what gradients give in all: exactly, after every step."""
    for ratio, *wrong in (row for result in played(worth_of_velocities) for row in result[how]):
        assert wrong == [0.0] * len(wrong), "the largest difference after each step"
        assert ratio < 1, "compression happened"


def test_what_a_narrow_raw_tensor_rounds_off_is_not_kept_for_good(played):
    """A residual drained into bfloat16 is rounded as plain averages are, of numbers of some 500: nobody sends that."""
    for imbalance, left in played(drained_into_bfloat16):
        assert 0.0 < imbalance <= 2 * 512 * 2.0**-8
        assert left == 0.0


def test_what_is_owed_waits_while_payloads_hold_velocities(played):
    """Of plain numbers too: they are no plain step that sends it."""
    for before, after in played(owed_beside_plain_payloads):
        assert before > 0
        assert after == before


def test_warm_up_changes_the_ratio_on_all_ranks_at_the_same_step(played):
    for sent, by_count, message in played(warm_up):
        assert sent[0] == sent[1] > 2 * sent[2] > 2 * sent[3]
        assert sent[3] == sent[4]
        assert by_count == sent
        assert "rank 1 says that epoch 2 begins, rank 0 says 1" in message


def test_automatic_mode_decides_again_when_the_ratio_changes(played):
    """Nothing here depends on how long a step takes: whether anything races, and what wins, does."""
    for (first, why_first), (second, why_second) in played(warm_up_automatic):
        assert first == pytest.approx(0.1)
        assert second == pytest.approx(0.01)
        assert why_first
        assert why_second


def test_an_optimizer_with_momentum_is_refused(played):
    for messages in played(optimizers):
        assert "SGD has momentum=0.9" in messages["momentum"]
        assert "Adam has beta1=0.9" in messages["adam"]
        assert messages["plain"] == messages["another model"] == messages["without correction"] == "stepped"


def test_one_job_has_one_momentum():
    with pytest.raises(ValueError, match=r"momentum is one for the whole job.*dgc:momentum=0.5"):
        Schedule([CompressorSpec.parse(f"dgc:momentum={mu}") for mu in (0.5, 0.9)])
    for text, message in (
        ("dgc:nesterov=true", "nesterov needs a momentum"),
        ("dgc:clip_norm=1.0", "clip_norm needs a momentum"),
        ("dgc:momentum=1", "below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            create(text)


def test_a_schedule_translates_strategies():
    spec = CompressorSpec.parse("dgc:ratio=0.01,warmup_epochs=1,momentum=0.9")
    schedule = Schedule([spec, CompressorSpec.parse("efsignsgd"), NONE])
    strategy = Strategy(
        (TensorSpec("a", (10,)), TensorSpec("b", (10,))),
        {"a": Choice(parse_option(SHARDED), spec), "b": PLAIN},
        TWO,
    )
    first, later = (translate(strategy, schedule.in_force(epoch, 0)) for epoch in (0, 1))
    assert str(first.choices["a"].compressor) == "dgc:momentum=0.9,ratio=0.1"
    assert str(later.choices["a"].compressor) == "dgc:momentum=0.9"
    assert first.choices["b"] == PLAIN
    shard = strategy.over(strategy.tensors[1:])  # which has nothing of "a"
    assert translate(shard, schedule.in_force(0, 0)).over(strategy.tensors) == first
    assert not translate(strategy, {spec: NONE}).compresses
    assert not schedule.is_fixed
    assert Schedule([CompressorSpec.parse("dgc")]).is_fixed


@pytest.mark.parametrize(("text", "waits"), [("powersgd", False), ("dgc:warmup_epochs=4", True)])
def test_who_names_no_epoch_is_reminded_where_something_waits_for_one(caplog, text, waits):
    follower = Follower(Schedule([CompressorSpec.parse(text)]), None, None)
    with caplog.at_level("WARNING", logger="espresso"):
        for step in range(REMIND_AFTER + 2):
            follower.moves(step)
    assert ["nobody called state.set_epoch" in record.getMessage() for record in caplog.records] == [True] * waits


# -- the oracle ------------------------------------------------------------------------------------


class Oracle:
    """One rank's DGC as the paper writes it; only what the codec selects is asked of the codec."""

    def __init__(self, rule: Correction, numels: dict[str, int], rank: int, masks: bool = True) -> None:
        self.rule, self.rank, self.masks = rule, rank, masks
        self.m = {name: np.zeros(n, np.float32) for name, n in numels.items()}
        self.v = {name: np.zeros(n, np.float32) for name, n in numels.items()}
        self.codec = host_codec(create(DGC))
        self.masked = 0

    def step(self, name: str, gradient: Any, step: int) -> Any:
        """What this rank sends of a tensor."""
        rule, mu = self.rule, np.float32(self.rule.momentum)
        g = gradient.astype(np.float32)
        norm = float(np.linalg.norm(g.astype(np.float64)))
        if rule.clip_norm and norm > rule.clip_norm / np.sqrt(2):
            g = g * np.float32(rule.clip_norm / np.sqrt(2) / norm)
        self.m[name] = mu * (self.m[name] + g) if rule.nesterov else mu * self.m[name] + g
        added = self.m[name] + g if rule.nesterov else self.m[name]
        if name in RAW:
            return added
        self.v[name] = self.v[name] + added
        sent = self._select(name, step)
        self.v[name] = self.v[name] - sent
        if self.v[name].size >= 256 and self.masks:
            self.m[name][sent != 0] = 0
            self.masked += int(np.count_nonzero(sent))
        return sent

    def _select(self, name: str, step: int) -> Any:
        layout = self.codec.compressor.layout([Segment(name, 0, self.v[name].size)])
        payload, out, starts = (
            np.zeros((1, layout.num_bytes), np.uint8),
            self.v[name].copy(),
            np.zeros(1, np.int64),
        )
        key = DrawKey(0, step, list(Site).index(Site.LOCAL), self.rank)
        self.codec.encode(Encoding(layout, self.v[name], starts, key=key), payload[0])
        self.codec.decode(Decoding(layout, out, starts), payload)
        return out


def gradients(buckets: tuple[Bucket, ...], rank: int, step: int) -> list[torch.Tensor]:
    random = np.random.default_rng([step, rank])
    return [torch.from_numpy(random.standard_normal(b.numel).astype(np.float32)) for b in buckets]


def strategy(buckets: tuple[Bucket, ...], option: str = ALLGATHER, spec: str = DGC, raw: tuple[str, ...] = RAW) -> Any:
    choice = Choice(parse_option(option), CompressorSpec.parse(spec))
    return strategy_of(buckets, TWO, {name: PLAIN if name in raw else choice for name in numels_of(buckets)})


def slots(buckets: tuple[Bucket, ...], tensors: list[torch.Tensor]) -> dict[str, Any]:
    return {
        slot.tensor: tensor[slot.offset : slot.offset + slot.numel].double().numpy()
        for bucket, tensor in zip(buckets, tensors, strict=True)
        for slot in bucket.slots
    }


def held(store: Any, numels: dict[str, int]) -> dict[str, Any]:
    total = {name: np.zeros(numel) for name, numel in numels.items()}
    for each in store.lend():
        total[each.tensor][each.start : each.start + each.numel] += each.read()
    return total


def against_the_oracle(rank: int) -> dict[str, dict[str, float]]:
    buckets = make_buckets(*SIZES)
    numels = numels_of(buckets)
    exchange = Exchange(1)
    exchange.warm_up({DGC})
    results = {}
    for how, rule in RULES.items():
        oracles = [Oracle(rule, numels, r) for r in (0, 1)]
        blind = Oracle(rule, numels, rank, masks=False)
        exchange.renew(correction=rule)
        plain = Assignment(strategy(buckets))
        in_order = planned(plain, buckets)
        worst = dict.fromkeys(("averages", "residuals", "velocities", "without masking"), 0.0)
        for step in range(STEPS):
            scale = 2.0 ** (step % 3)
            mine = [g * scale for g in gradients(buckets, rank, step)]
            got = slots(buckets, exchange.step(plain if step < 2 else in_order, buckets, mine, grad_scale=scale))
            sent: dict[str, Any] = dict.fromkeys(numels, 0.0)
            for oracle in oracles:
                for name, g in slots(buckets, gradients(buckets, oracle.rank, step)).items():
                    sent[name] = sent[name] + oracle.step(name, g, step)
            for name, g in slots(buckets, gradients(buckets, rank, step)).items():
                blind.step(name, g, step)
            kept, moving = held(exchange.store, numels), held(exchange.velocities, numels)
            for name in numels:
                worst["averages"] = max(worst["averages"], np.abs(got[name] / scale - sent[name] / 2).max())
                worst["residuals"] = max(worst["residuals"], np.abs(kept[name] - oracles[rank].v[name]).max())
                worst["velocities"] = max(worst["velocities"], np.abs(moving[name] - oracles[rank].m[name]).max())
                worst["without masking"] = max(worst["without masking"], np.abs(moving[name] - blind.m[name]).max())
        results[how] = worst | {"masked": oracles[rank].masked}
    exchange.close()
    return results


def every_family(rank: int) -> dict[str, tuple[float, float, float]]:
    """For each: the most of what is missing from the sum over ranks, what is kept, and the most that was given."""
    buckets = make_buckets(*SIZES)
    numels = numels_of(buckets)
    exchange = Exchange(1)
    results = {}
    for family, option in FAMILIES.items():
        spec = f"{family},momentum={MU},nesterov=true" if ":" in family else f"{family}:momentum={MU},nesterov=true"
        exchange.warm_up({spec})
        exchange.renew(correction=create(spec).correction)
        assignment = Assignment(strategy(buckets, option, spec, raw=()))
        m = {name: np.zeros(numel) for name, numel in numels.items()}
        missing = {name: np.zeros(numel) for name, numel in numels.items()}
        most = 0.0
        for step in range(STEPS):
            got = slots(buckets, exchange.step(assignment, buckets, gradients(buckets, rank, step)))
            both = [slots(buckets, gradients(buckets, r, step)) for r in (0, 1)]
            for name in numels:
                total = both[0][name] + both[1][name]
                m[name] = MU * (m[name] + total)
                missing[name] += m[name] + total - 2 * got[name]
                most = max(most, float(np.abs(m[name] + total).max()))
        kept = exchange.groups.all_objects(held(exchange.store, numels))
        for name in numels:
            missing[name] -= kept[0][name] + kept[1][name]
        left = max(float(np.abs(values).max()) for values in kept[rank].values())
        results[spec] = max(float(np.abs(values).max()) for values in missing.values()), left, most
    exchange.close()
    return results


def velocity_sites(rank: int) -> dict[str, set[str]]:
    buckets = make_buckets(*SIZES)
    exchange = Exchange(1)
    sites = {}
    for option in (SHARDED, ON_SUMS):
        exchange.renew(correction=RULES["plain"])
        assignment = Assignment(strategy(buckets, option, raw=()))
        for step in range(2):
            exchange.step(assignment, buckets, gradients(buckets, rank, step))
        assert exchange.velocities is not None
        sites[option] = {each.site.value for each in exchange.velocities.lend() if each.site is not None}
        assert len(exchange.sites()) == (2 if option == SHARDED else 1)
    exchange.close()
    return sites


def everything_sent(rank: int) -> dict[str, float]:
    buckets = make_buckets(*SIZES)
    exchange = Exchange(1)
    errors = {}
    for option in (ALLGATHER, SHARDED, ON_SUMS):
        exchange.renew(correction=RULES["plain"])
        assignment = Assignment(strategy(buckets, option, "dgc:ratio=1,raw_below=0", raw=()))
        worst = 0.0
        for step in range(3):
            draws = [[torch.from_numpy(np.random.default_rng([step, r, b.index]).integers(1, 9, b.numel)).float() * 2
                      for b in buckets] for r in (0, 1)]  # fmt: skip
            got = exchange.step(assignment, buckets, draws[rank])
            for average, a, b in zip(got, *draws, strict=True):
                worst = max(worst, float((average - (a + b) / 2).abs().max()))
        errors[option] = worst
    exchange.close()
    return errors


def replanned(rank: int) -> tuple[float, float]:
    """The ratio is tiny, so that hardly anything is masked; where something was, it does not count."""
    first, rebuilt = make_buckets(*SIZES), make_buckets({"c": 1501, "a": 3000}, {"b": 700, "tiny": 40})
    numels = numels_of(first)
    exchange = Exchange(1).renew(correction=RULES["plain"])
    expected = {name: np.zeros(numel) for name, numel in numels.items()}
    sent = {name: np.zeros(numel, bool) for name, numel in numels.items()}
    everything = tuple(numels)
    spec = "dgc:ratio=0.001"
    phases = [(first, ALLGATHER, everything), (first, ALLGATHER, ()), (rebuilt, ON_SUMS, ()), (rebuilt, ALLGATHER, ()),
              (first, ON_SUMS, ()), (first, ALLGATHER, everything)]  # fmt: skip
    step = 0
    for buckets, option, raw in phases:
        assignment = Assignment(strategy(buckets, option, spec, raw))
        for _ in range(2):
            got = slots(buckets, exchange.step(assignment, buckets, gradients(buckets, rank, step)))
            both = [slots(buckets, gradients(buckets, r, step)) for r in (0, 1)]
            for name in numels:
                expected[name] = MU * expected[name] + both[0][name] + both[1][name]
                if not raw:
                    sent[name] |= got[name] != 0
            step += 1
    assert exchange.velocities is not None
    mine = held(exchange.velocities, numels)
    everybody = exchange.groups.all_objects(mine)
    total = {name: everybody[0][name] + everybody[1][name] for name in numels}
    for name in ("tiny", "b"):  # under raw_below, or nearly: sent whole, and not masked
        sent[name] &= numels[name] >= 256
    assert all(not mask.all() for mask in sent.values())
    error = max(float(np.abs((total[n] - expected[n])[~sent[n]]).max()) for n in numels)
    exchange.close()
    return error, max(float(np.abs(values).max()) for values in total.values())


def worth_of_velocities(rank: int) -> dict[str, list[tuple[float, ...]]]:
    """From raw to sums, to local and back; random-k sends numbers as they are, and masks nothing. All is dyadic.

    With mu = 1/2 a gradient gives 1/(1-mu) = 2 of itself in all, and a velocity mu/(1-mu) = 1, wherever it is kept.
    """
    buckets = make_buckets(*SIZES)
    numels = numels_of(buckets)
    exchange = Exchange(1)
    exchange.warm_up({"randomk:ratio=0.25,raw_below=1"})
    results: dict[str, list[tuple[float, ...]]] = {}
    for how in ("plain", "nesterov"):
        spec = f"randomk:ratio=0.25,raw_below=1,momentum=0.5,nesterov={str(how == 'nesterov').lower()}"
        exchange.renew(correction=create(spec).correction)
        wrong = []
        sent, given = ({name: np.zeros(numel) for name, numel in numels.items()} for _ in range(2))
        num_sent = num_raw = 0
        for step, option in enumerate((*[None] * 2, *[ON_SUMS] * 3, *[ALLGATHER] * 2, *[ON_SUMS] * 2, None)):
            raw = tuple(numels) if option is None else ()
            plan = Assignment(strategy(buckets, option or ALLGATHER, spec, raw))
            scale = 2.0 ** (step % 3)
            both = [slots(buckets, integers(buckets, r, 2, step)) for r in (0, 1)]
            mine = [gradient * scale for gradient in integers(buckets, rank, 2, step)]
            got = slots(buckets, exchange.step(plan, buckets, mine, grad_scale=scale))
            if option is not None:
                num_sent, num_raw = num_sent + exchange.record.bytes_sent, num_raw + exchange.record.bytes_raw
            kept = exchange.groups.all_objects((held(exchange.store, numels), held(exchange.velocities, numels)))
            for name in numels:
                sent[name] += 2 * got[name] / scale
                given[name] += 2 * (both[0][name] + both[1][name])
            left = {name: sum(owed[name] + moving[name] for owed, moving in kept) for name in numels}
            wrong.append(max(float(np.abs(given[n] - sent[n] - left[n]).max()) for n in numels))
        results[how] = [(num_sent / num_raw, *wrong)]
    exchange.close()
    return results


def drained_into_bfloat16(rank: int) -> tuple[float, float]:
    """Only rank 0 has gradients, so that the reduction itself rounds nothing."""
    buckets = make_buckets({"a": 3000}, dtype="bfloat16")
    numels = numels_of(buckets)
    exchange = Exchange(1)
    choice = Choice(parse_option(ALLGATHER), CompressorSpec.parse("topk:ratio=0.05"))
    lossy, raw = (Assignment(strategy_of(buckets, TWO, c)) for c in (choice, PLAIN))
    sent, given = np.zeros(3000), np.zeros(3000)
    left = 0.0
    for step, assignment in enumerate((lossy, lossy, raw, raw)):
        random = np.random.default_rng(step)
        numbers = random.integers(-7, 8, 3000) * 2.0 + (512.0 if assignment is raw else 0.0)
        gradient = torch.from_numpy(numbers * (rank == 0)).to(torch.bfloat16)
        (average,) = exchange.step(assignment, buckets, [gradient])
        sent += average.double().numpy() * 2
        given += gradient.double().numpy()
        left = float(np.abs(held(exchange.store, numels)["a"]).max())
    kept = sum(exchange.groups.all_objects(held(exchange.store, numels)["a"]))
    total = sum(exchange.groups.all_objects(given))
    left = max(exchange.groups.all_objects(left))
    exchange.close()
    return float(np.abs(sent + kept - total).max()), left


def owed_beside_plain_payloads(rank: int) -> tuple[float, float]:
    """What is owed after two lossy steps, and after one more of which payloads hold every number."""
    buckets = make_buckets({"a": 3000})
    exchange = Exchange(1).renew(correction=RULES["plain"])
    lossy = Assignment(strategy(buckets, raw=()))
    exact = Assignment(strategy_of(buckets, TWO, Choice(parse_option(ALLGATHER), NONE)))
    owed = []
    for step, assignment in enumerate((lossy, lossy, exact)):
        exchange.step(assignment, buckets, gradients(buckets, rank, step))
        owed.append(float(np.abs(held(exchange.store, numels_of(buckets))["a"]).sum()))
    exchange.close()
    return owed[1], owed[2]


# -- the state -------------------------------------------------------------------------------------


def backward(ddp: Any, rank: int, step: int) -> None:
    ddp.zero_grad()
    ddp(batch(rank, step, 20)).square().mean().backward()
    sgd(ddp)


def warm_up(rank: int) -> tuple[list[float], list[float], str]:
    """Bytes of a step in epochs 0, 0, 1, 2, 3 of a warm-up of two."""
    results = []
    message = ""
    for settings in ({}, {"steps_per_epoch": 2}):
        ddp = wrap(mlp(20, 200, 100, 5), find_unused_parameters=True)
        sent = []
        with registered(ddp, SHARDED, "dgc:ratio=0.001,warmup_epochs=2,momentum=0.5", **settings) as state:
            if not settings:
                state.set_epoch(0)
            for step in range(8):
                if not settings and step % 2 == 0:
                    state.set_epoch(step // 2)
                backward(ddp, rank, step)
                assert agreed(ddp)
                if step in (0, 1, 2, 4, 6):
                    sent.append(state.metrics()["espresso/bytes_sent"])
            assert state.metrics()["espresso/velocity_bytes"] > 0
            if not settings:
                try:
                    state.set_epoch(1 + rank)
                except DisagreementError as error:
                    message = str(error)
        results.append(sent)
    return results[0], results[1], message


def warm_up_automatic(rank: int) -> list[tuple[float, str]]:
    """The ratio that was searched for, and the verdict, of a warm-up's epoch and of the one after it."""
    ddp = wrap(mlp(20, 200, 100, 5), find_unused_parameters=True)
    verdicts: list[Any] = []
    results = []
    with registered(
        ddp, compressor="dgc:ratio=0.01,warmup_epochs=1", strategy="auto", timeout_s=60.0, race_steps=3,
        race_rounds=1, decide_by=1,
    ) as state:  # fmt: skip
        step = 0
        for epoch in range(2):
            state.set_epoch(epoch)
            for _ in range(MOST_STEPS):
                backward(ddp, rank, step)
                step += 1
                assert agreed(ddp)
                verdict = state.session.decider.verdict
                if verdict is not None and all(verdict is not known for known in verdicts):
                    break
            assert state.decided
            search = state.session.search
            assert search is not None
            assert verdict is not None
            verdicts.append(verdict)
            ratio = dict(search.compressors[0].params).get("ratio", 0.01)
            results.append((ratio, verdict.reason))
        costs = [] if state.job is None else [cost.spec for cost in state.job.costs.compute]
        assert any("ratio=0.1" in spec for spec in costs)
        assert "dgc" in costs, costs
    return results


def optimizers(rank: int) -> dict[str, str]:
    ddp, other = wrap(mlp(20, 60, 5)), mlp(20, 60, 5)
    other(batch(rank, 0, 20)).square().mean().backward()
    spec = "dgc:ratio=0.05,momentum=0.9"
    made = {
        "plain": torch.optim.SGD(ddp.parameters(), lr=0.1),
        "momentum": torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9),
        "adam": torch.optim.Adam(ddp.parameters()),
        "another model": torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9),
    }
    messages = {}
    with registered(ddp, ALLGATHER, spec):
        backward(ddp, rank, 0)
        for what, optimizer in made.items():
            messages[what] = outcome(optimizer)
    messages["without correction"] = outcome(made["momentum"])
    return messages


def outcome(optimizer: torch.optim.Optimizer) -> str:
    try:
        optimizer.step()
    except ValueError as error:
        return str(error)
    return "stepped"


SCENARIOS = (
    against_the_oracle, every_family, velocity_sites, everything_sent, replanned, worth_of_velocities,
    drained_into_bfloat16, owed_beside_plain_payloads, warm_up, warm_up_automatic, optimizers,
)  # fmt: skip


@pytest.fixture(scope="module")
def played() -> Played:
    return Played(__name__, SCENARIOS, 2, ranks_per_node=1, deadline_s=120)
