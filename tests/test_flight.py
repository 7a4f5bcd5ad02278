"""The flight recorder: what it keeps of a live job, its files, and clocks."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import signal
import threading
import time
from contextlib import chdir, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import espresso
from espresso.comm.connections import Sent
from espresso.comm.execute import averaging
from espresso.comm.execute.assignment import Assignment, Interval, Record
from espresso.comm.execute.averaging import Averager
from espresso.comm.groups import Member
from espresso.comm.witness import Witness
from espresso.diagnosis.overlap import measured_overlap
from espresso.flight.clocks import Clock, align, tick_of
from espresso.flight.form import MOST_VALUES, Flight, FlightError, Script, Span, StepRecord, Stretch, Tick, load_run
from espresso.flight.processors import Delays, Spent
from espresso.live.figures import _predicted_overlap
from espresso.live.marks import _with_gradient
from espresso.live.names import named_gradients, tensor_specs
from espresso.live.recorder import Recorder, _Listening, now_us
from espresso.model.presets import job_from_trace
from espresso.strategies import Bucket, Choice, Cluster, CompressorSpec, Lane, Slot, Strategy, TensorSpec, parse_option
from tests.ddp import ALLGATHER, SHARDED, Played, Said, agreed, mlp, registered, wrap

TENSORS = (TensorSpec("a", (8,)), TensorSpec("b", (4,)))
BUCKETS = (Bucket(0, (Slot("a", 0, 8),)), Bucket(1, (Slot("b", 0, 4),)))
CLUSTER = Cluster(2, 1)
STRETCH = Stretch(Strategy.uniform(TENSORS, CLUSTER, partition_bytes=0), BUCKETS)


def step(number: int, at: float, *, took: float = 10.0) -> StepRecord:
    """Two exchanges, ``took`` each, from ``at`` on."""
    spans = tuple(Span(task, at + task, at + task, at + task + took, 48) for task in range(2))
    return StepRecord(number, 0, Script(began_us=at - 50, entered_us=at - 40), (at, at + 1), at + 1 + took, spans=spans)


def flight(rank: int = 0, count: int = 3, **changes: Any) -> Flight:
    steps = tuple(step(number, 1e6 + 1000.0 * number) for number in range(count))
    return replace(Flight(rank, 2, "here", CLUSTER, (STRETCH,), steps, facts={"buffer_bytes": 0}), **changes)


# -- the file ----------------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    for rank in (1, 0):
        flight(rank, ticks=(Tick(1.0, 2.0, 3.0),)).save(tmp_path / f"flight-{rank:05d}.json")
    found = load_run(tmp_path)
    assert [each.rank for each in found] == [0, 1]
    assert found[1] == flight(1, ticks=(Tick(1.0, 2.0, 3.0),))
    assert str(found[0].of(found[0].steps[0]).task(found[0].steps[0].spans[1]).step) == "flat.allreduce"


def test_a_file_is_bounded(tmp_path: Path) -> None:
    many = flight(count=12_000)
    many.save(tmp_path / "flight-00000.json")
    (kept,) = load_run(tmp_path)
    assert sum(each.num_values for each in kept.steps) <= MOST_VALUES
    assert kept.steps[-1] == many.steps[-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rank": 2}, "rank must be a whole number of at most 1"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"kind": "espresso-job"}, "this is a job file"),
        ({"steps": [{}]}, "steps[0] lacks the key 'number'"),
        ({"ticks": [[1, 2]]}, "ticks[0] must be a list of 3 values"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "flight-00000.json"
    path.write_text(json.dumps(flight().to_json() | change))
    with pytest.raises(FlightError) as caught:
        load_run(tmp_path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_steps_that_make_no_sense_are_refused() -> None:
    wrong = step(0, 0.0)
    for bad, said in (
        (replace(wrong, ready_us=(1.0,)), "1 ready times for 2 buckets"),
        (replace(wrong, stretch=1), "stretch"),
        (replace(wrong, spans=(Span(5, 0, 0, 1, 0),)), "task"),
        (replace(wrong, spans=(Span(0, 0, 2, 1, 0),)), "ends before it starts"),
    ):
        with pytest.raises(FlightError, match=said):
            flight(steps=(bad,))
    with pytest.raises(FlightError, match="step 0 follows step 0"):
        flight(steps=(wrong, wrong))


def test_files_of_two_runs_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(FlightError, match="holds no flight records"):
        load_run(tmp_path)
    flight().save(tmp_path / "flight-00000.json")
    flight().save(tmp_path / "flight-00001.json")
    with pytest.raises(FlightError, match="two of the flight records are rank 0's"):
        load_run(tmp_path)
    flight(0, facts={"group": [1, 3]}).save(tmp_path / "flight-00001.json")
    assert load_run(tmp_path) == [flight(other_groups=((1,),))]
    flight(0, facts={"group": [0, 1]}).save(tmp_path / "flight-00000.json")
    flight(1, num_ranks=3, facts={"group": [0, 1, 2]}).save(tmp_path / "flight-00001.json")
    with pytest.raises(FlightError, match=r"ranks 0, 1 and of ranks 0, 1, 2 lie in .* remove the older"):
        load_run(tmp_path)
    flight().save(tmp_path / "flight-00000.json")
    flight(1, num_ranks=3).save(tmp_path / "flight-00001.json")
    with pytest.raises(FlightError, match="of runs with 2 and 3 ranks"):
        load_run(tmp_path)
    flight(0, facts={"run": "a"}).save(tmp_path / "flight-00000.json")
    flight(1).save(tmp_path / "flight-00001.json")
    assert len(load_run(tmp_path)) == 2, "one says nothing of its run"
    flight(1, facts={"run": "b"}).save(tmp_path / "flight-00001.json")
    with pytest.raises(FlightError, match=r"rank 0's and rank 1's flight records are of different runs: remove the ol"):
        load_run(tmp_path)


# -- clocks ------------------------------------------------------------------------------------------

AHEAD_US, DRIFT = 7e6, 4e-5


def shifted(at_us: float) -> float:
    """A clock seven seconds ahead that gains 40 us a second."""
    return at_us + AHEAD_US + DRIFT * (at_us - 1e6)


def shift(this: Flight) -> Flight:
    steps = tuple(
        replace(
            each,
            ready_us=tuple(map(shifted, each.ready_us)),
            done_us=shifted(each.done_us),
            spans=tuple(
                s._replace(issue_us=shifted(s.issue_us), start_us=shifted(s.start_us), end_us=shifted(s.end_us))
                for s in each.spans
            ),
        )
        for each in this.steps
    )
    return replace(this, steps=steps)


def trips_at(at_us: float) -> list[tuple[float, float, float]]:
    """Round trips of 60 us or more, not quite as long there as back."""
    return [(shifted(at_us), at_us + 20 + 5 * n, shifted(at_us + 60 + 40 * n)) for n in range(8)]


def test_round_trips_align_clocks_that_drift() -> None:
    truth = flight(0, 400)
    ticks = tuple(tick_of(trips_at(at)) for at in (1e6, 1.2e6, 1.39e6))
    clock = align([truth, replace(shift(flight(1, 400)), ticks=ticks)])[1]
    for each in truth.steps:
        assert abs(clock.common(shifted(each.done_us)) - each.done_us) < 100


def test_a_round_trip_that_was_held_up_is_left_out_where_others_are_sure() -> None:
    truth = flight(0, 400)
    ticks = [tick_of(trips_at(at)) for at in (1e6, 1.2e6, 1.39e6)]
    held_up = tick_of([(shifted(1.41e6), 1.41e6 + 9_000, shifted(1.41e6 + 10_000))])
    assert held_up.error_us > 1_000
    clock = align([truth, replace(shift(flight(1, 400)), ticks=(*ticks, held_up))])[1]
    for each in truth.steps:
        assert abs(clock.common(shifted(each.done_us)) - each.done_us) < 100


def test_the_ends_of_collectives_align_clocks_where_no_round_trips_did() -> None:
    truth = flight(0, 400)
    for ticks in ((), (tick_of(trips_at(1e6 - 1e5)),)):
        clock = align([truth, replace(shift(flight(1, 400)), ticks=ticks)])[1]
        for each in truth.steps:
            assert abs(clock.common(shifted(each.done_us)) - each.done_us) < 100
    assert Clock().common(5.0) == 5.0


# -- connections -------------------------------------------------------------------------------------


def test_a_thread_that_ended_is_not_taken_for_the_next_one() -> None:
    seen = []
    for _ in range(4):
        thread = threading.Thread(target=lambda: seen.append(Spent.now().thread))
        thread.start()
        thread.join()
        time.sleep(0.1)  # it is gone only now
    assert len(set(seen)) == 4


# -- a live job --------------------------------------------------------------------------------------


class Normed(nn.Module):
    """With buffers that DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 60), nn.BatchNorm1d(60), nn.Tanh(), nn.Linear(60, 5))

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.net(inputs)}


def run(ddp: Any, optimizer: torch.optim.Optimizer, count: int, micro: int = 1) -> None:
    for _ in range(count):
        for _ in range(micro - 1):
            with ddp.no_sync():
                _loss(ddp(torch.randn(4, 20))).backward()
        _loss(ddp(torch.randn(4, 20))).backward()
        optimizer.step()
        optimizer.zero_grad()


def _loss(out: Any) -> torch.Tensor:
    found: torch.Tensor = (out["logits"] if isinstance(out, dict) else out).sum()
    return found


def plain(rank: int, folder: str) -> dict[str, Any]:
    ddp = wrap(Normed())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with registered(ddp, artifacts_dir=folder) as state:
        run(ddp, optimizer, 6)
        run(ddp, optimizer, 4, micro=3)
        copies = [copy.deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))]
        for each in copies:
            each(torch.randn(4, 20))
        state.record(f"{folder}/asked", last=4)
        steps = state.session.recorder.flight().steps
        state.session.recording.pause()
        run(ddp, optimizer, 3)
        assert state.session.recorder.flight().steps[-1].script == steps[-1].script
        state.session.recording.go_on()
        run(ddp, optimizer, 2)
        numbers = [each.number for each in state.session.recorder.flight().steps]
        assert numbers == [*range(10), 13, 14], numbers
        assert agreed(ddp)
    assert all(each.hook_us > 0 for each in steps)
    # not every one: an exchange over at once ends within the hook, and what follows its end counts as well
    assert sum(each.hook_us < each.done_us - each.script.backward_us for each in steps) > len(steps) / 2
    return {"steps": [(each.number, each.script, len(each.ready_us), len(each.spans)) for each in steps]}


def compressed(rank: int) -> list[tuple[list[str], int, int]]:
    ddp = wrap(mlp(20, 300, 5))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with registered(ddp, SHARDED, "efsignsgd", partition_bytes=4096) as state:
        run(ddp, optimizer, 6)
        flight = state.session.recorder.flight()
    found = []
    for each in flight.steps:
        stretch = flight.of(each)
        for span in each.spans:
            assert span.issue_us <= span.start_us <= span.end_us <= each.done_us
            assert (span.num_bytes > 0) == stretch.task(span).step.is_communication
        steps = sorted({str(stretch.task(span).step) for span in each.spans})
        assert len(each.spans) == len(stretch.plan.tasks)
        found.append((steps, sum(span.num_bytes for span in each.spans), each.bytes_sent))
    return found


def observed(rank: int, folder: str) -> dict[str, Any]:
    ddp = wrap(mlp(20, 300, 5))
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    watch = espresso.observe(ddp, folder, ranks_per_node=1)
    run(ddp, optimizer, 12, micro=2)
    found = watch.diagnose()
    steps = watch.recorder.flight().steps
    assert watch.recorder.facts["card_rate"] > 0
    assert all(each.script.beside_us is not None and each.script.beside_us >= 0 for each in steps[1:-1])
    assert Delays.open() is None or all((each.script.waited_us or 0) >= 0 for each in steps)
    watch.close()
    watch.close()
    for each in steps:
        assert each.script.backward_us is not None
        assert list(each.ready_us) == sorted(each.ready_us)
        assert each.script.backward_us <= each.ready_us[0]
        assert each.ready_us[-1] <= each.done_us
    assert agreed(ddp)
    return {"steps": len(steps), "found": found.to_json(), "passes": {each.script.passes for each in steps}}


class Branches(nn.Module):
    """In turn one of two layers, or always the same; the first one is always there."""

    def __init__(self, turns: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(20, 20), nn.Linear(20, 5), nn.Linear(20, 5)])
        self.count, self.turns = 0, turns

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.count += 1
        found: torch.Tensor = self.layers[1 + self.count % self.turns](self.layers[0](inputs))
        return found


def watched_oddly(rank: int, folder: str) -> list[tuple[int, set[str], set[str]]]:
    """Of observed jobs: steps, tensors, and where records lie. Of two, which are twins, some parameters are frozen, of
    two unused, and of one of these frozen once it was wrapped.
    """
    frozen, twin = (mlp(20, 300, 5) for _ in range(2))
    frozen[0].requires_grad_(False)
    twin[0].requires_grad_(False)
    unused = wrap(Branches(), find_unused_parameters=True, bucket_cap_mb=0.0005)
    unused.module.layers[0].bias.requires_grad_(False)
    found = []
    for ddp in (
        wrap(frozen), unused, wrap(twin), wrap(Branches(turns=1), static_graph=True, bucket_cap_mb=0.0005),
    ):  # fmt: skip
        watch = espresso.observe(ddp, folder, ranks_per_node=1)
        # Passes that exchange nothing use the layer too that the one that does leaves out.
        run(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 12, micro=1 if ddp.static_graph else 3)
        watch.diagnose()
        watch.close()
        flight = watch.recorder.flight()
        for each in flight.steps:
            assert each.script.backward_us is not None
            assert each.script.backward_us <= min(each.ready_us) <= max(each.ready_us) <= each.done_us
        slots = {slot.tensor for bucket in flight.stretches[0].buckets for slot in bucket.slots}
        found.append((len(flight.steps), slots, {str(path) for path in Path(folder).rglob(f"*{rank}.json")}))
    return found


def graded(rank: int) -> list[int]:
    """Jobs that take gradients of the output before their backward pass and behind it: how many steps were kept."""
    counts = []
    for is_observed in (False, True):
        ddp, inputs, sides = wrap(mlp(20, 300, 5)), torch.randn(4, 20, requires_grad=True), []
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with closing(espresso.observe(ddp, ranks_per_node=1)) if is_observed else registered(ddp) as job:
            for _ in range(8):
                out = ddp(inputs).sum()
                torch.autograd.grad(out, inputs, retain_graph=True)
                began = now_us()
                out.backward(retain_graph=True)
                sides.append((began, now_us()))
                torch.autograd.grad(out, inputs)
                optimizer.step()
            steps = (job.recorder if is_observed else job.session.recorder).flight().steps
        for each in steps:
            script, (began, ended) = each.script, sides[each.number - is_observed]
            moments = [began, script.backward_us, *each.ready_us, script.backward_end_us, script.averaged_us, ended]
            assert moments == sorted(moments), (is_observed, each.number, moments)
            assert script.passes == 1
        counts.append(len(steps))
    return counts


class Opaque(nn.Module):
    """What it returns nobody looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 5)

    def forward(self, inputs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.layer(inputs))


def unseen(rank: int) -> list[str]:
    """What is said of a job whose backward pass nothing shows."""
    ddp = wrap(Opaque())
    with Said() as said, closing(espresso.observe(ddp, ranks_per_node=1)):
        for _ in range(20):
            ddp(torch.randn(4, 20)).logits.sum().backward()
    return said.warnings


def asked(rank: int, folder: str) -> list[Any]:
    """By a signal, and a diagnosis inside the run."""
    ddp = wrap(mlp(20, 300, 5))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before = signal.getsignal(signal.SIGUSR1)
    with registered(ddp, artifacts_dir=folder, record_signal="SIGUSR1") as state:
        run(ddp, optimizer, 12)
        os.kill(os.getpid(), signal.SIGUSR1)
        written = json.loads(Path(folder, f"flight-{rank:05d}.json").read_text())
        found, metrics = state.diagnose(), state.metrics()
        second = wrap(mlp(20, 30, 5))
        with registered(second, artifacts_dir=folder, record_signal="SIGUSR1"):
            run(second, torch.optim.SGD(second.parameters(), lr=0.1), 3)
            state.close()  # the first one first
            os.kill(os.getpid(), signal.SIGUSR1)
            assert Path(folder, "2", f"flight-{rank:05d}.json").exists()
    assert signal.getsignal(signal.SIGUSR1) is before
    return [written["facts"]["written"], found.num_steps, 0 <= metrics["espresso/overlap"] <= 1, str(found)]


def failing(rank: int, folder: str) -> str:
    ddp = wrap(mlp(20, 30, 5))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with registered(ddp, artifacts_dir=folder) as state:
        run(ddp, optimizer, 4)
        state.session.executor.lanes.fail(espresso.EspressoError("for the record"))
        with pytest.raises(espresso.EspressoError, match="for the record"), state.errors():
            run(ddp, optimizer, 1)
    return json.loads(Path(folder, f"flight-{rank:05d}.json").read_text())["facts"]["written"]


def asked_for_without_a_folder(rank: int, folder: str) -> list[str]:
    """By two models of a process: where a signal's records lie."""
    Path(folder).mkdir(exist_ok=True)
    first, second = wrap(mlp(20, 30, 5)), wrap(mlp(20, 30, 5))
    with (
        chdir(folder), registered(first, record_signal="SIGUSR1"), registered(second, record_signal="SIGUSR1")
    ):  # fmt: skip
        for ddp in (first, second):
            run(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 2)
        os.kill(os.getpid(), signal.SIGUSR1)
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob(f"*{rank}.json"))


def failing_at_last(rank: int, folder: str) -> bool:
    """Whether the record of an error is there after closing, which begins before it is written."""
    ddp, written, found = wrap(mlp(20, 30, 5)), Path(folder, f"flight-{rank:05d}.json"), list[bool]()
    closes, end = threading.Event(), Witness.close

    def close(witness: Witness) -> None:
        closes.set()
        end(witness)
        found.append(written.exists())

    with patch.object(Witness, "close", close), registered(ddp, artifacts_dir=folder) as state:
        run(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 2)
        write = state.session.recorder.write
        state.session.recorder.write = lambda path: (closes.wait(10), write(path))
        state.session.executor.lanes.fail(espresso.EspressoError("for the record"))
    return found[0]


def dropped(rank: int, folder: str) -> tuple[str, int]:
    """A script whose ``main`` keeps model and state to itself, and returns."""

    def main() -> None:
        ddp = wrap(mlp(20, 30, 5))
        espresso.register(ddp, "efsignsgd", ranks_per_node=1, artifacts_dir=folder, timeout_s=15.0)
        run(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 4)

    main()
    gc.collect()
    written, until = Path(folder, f"flight-{rank:05d}.json"), time.monotonic() + 10
    while not written.exists() and time.monotonic() < until:
        time.sleep(0.05)
    flight = json.loads(written.read_text())
    return flight["facts"]["written"], len(flight["steps"])


def forked(rank: int, folder: str) -> tuple[int, bool]:
    """A process forked on the way lets go of all it got, and its parent trains on."""
    ddp = wrap(mlp(20, 30, 5))
    espresso.register(ddp, "efsignsgd", ranks_per_node=1, artifacts_dir=folder, timeout_s=15.0, record_signal="SIGUSR2")
    optimizer, written = torch.optim.SGD(ddp.parameters(), lr=0.1), Path(folder, f"flight-{rank:05d}.json")
    run(ddp, optimizer, 2)
    child = os.fork()
    if not child:
        try:
            os.kill(os.getpid(), signal.SIGUSR2)  # as a whole process group may get it
            del ddp, optimizer
            gc.collect()
            time.sleep(1.0)
        finally:
            os._exit(written.exists())
    status = os.waitpid(child, 0)[1]
    run(ddp, optimizer, 2)
    return status, written.exists()


def given_file(rank: int, folder: str) -> bool:
    """The strategy of an earlier run, in the folder of this one."""
    ddp, path = wrap(mlp(20, 300, 5)), Path(folder, "strategy.json")
    if rank == 0:
        spec = CompressorSpec.parse("dgc:ratio=0.01,warmup_epochs=2")
        tensors = tensor_specs(named_gradients(ddp))
        path.parent.mkdir(parents=True)
        Strategy.uniform(tensors, Cluster(2, 1), Choice(parse_option(ALLGATHER), spec)).save(path)
    dist.barrier()
    before = path.read_bytes()
    with registered(ddp, strategy=str(path), artifacts_dir=folder) as state:
        run(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 3)
        assert state.strategy.compresses
    return path.read_bytes() == before


def test_a_signal_has_back_who_had_it_before_whichever_thread_ends_a_job():
    number, before, told = signal.SIGUSR2, signal.getsignal(signal.SIGUSR2), list[str]()
    signal.signal(number, lambda *_: told.append("mine"))
    try:
        listening = _Listening()
        for text in ("first", "second"):
            write = partial(told.append, text)
            listening.add(number, write)
            os.kill(os.getpid(), number)
            if text == "first":
                thread = threading.Thread(target=listening.end, args=(number, write))
                thread.start()
                thread.join()
            else:
                listening.end(number, write)
        os.kill(os.getpid(), number)
        assert told == ["first", "second", "mine"]
    finally:
        signal.signal(number, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("flights"))


def test_metrics_of_a_strategy_that_nobody_measured_say_nothing_of_its_overlap():
    """As ``state.use`` may have it: training must not end by what is logged."""
    job = job_from_trace("vgg16", 2, 1, "pcie-25g")
    unmeasured = Choice(parse_option("comp > flat.allgather > dec"), CompressorSpec("natural"))
    strategy = Strategy.uniform(job.tensors, job.cluster, unmeasured)
    session: Any = SimpleNamespace(
        search=SimpleNamespace(job=job), decider=SimpleNamespace(strategy=strategy), overlap_of=None
    )  # fmt: skip
    assert _predicted_overlap(session) == 0.0


@pytest.fixture(scope="module")
def played(folder: str) -> Played:
    scenarios = [
        plain_here,
        compressed,
        observed_here,
        watched_oddly_here,
        graded,
        unseen,
        asked_here,
        failing_here,
        failing_at_last_here,
        asked_for_without_a_folder_here,
        dropped_here,
        forked_here,
        given_file_here,
    ]
    return Played(__name__, scenarios, 2, environment={"FLIGHTS": folder})


def plain_here(rank: int) -> dict[str, Any]:
    return plain(rank, os.environ["FLIGHTS"] + "/plain")


def observed_here(rank: int) -> dict[str, Any]:
    return observed(rank, os.environ["FLIGHTS"] + "/observed")


def watched_oddly_here(rank: int) -> list[tuple[int, set[str], set[str]]]:
    return watched_oddly(rank, os.environ["FLIGHTS"] + "/oddly")


def asked_here(rank: int) -> list[Any]:
    return asked(rank, os.environ["FLIGHTS"] + "/asked")


def failing_here(rank: int) -> str:
    return failing(rank, os.environ["FLIGHTS"] + "/failing")


def failing_at_last_here(rank: int) -> bool:
    return failing_at_last(rank, os.environ["FLIGHTS"] + "/failing-at-last")


def asked_for_without_a_folder_here(rank: int) -> list[str]:
    return asked_for_without_a_folder(rank, os.environ["FLIGHTS"] + "/nowhere")


def dropped_here(rank: int) -> tuple[str, int]:
    return dropped(rank, os.environ["FLIGHTS"] + "/dropped")


def forked_here(rank: int) -> tuple[int, bool]:
    return forked(rank, os.environ["FLIGHTS"] + "/forked")


def given_file_here(rank: int) -> bool:
    return given_file(rank, os.environ["FLIGHTS"] + "/given")


def test_a_strategy_file_that_was_given_is_left_as_it_is(played: Played) -> None:
    assert played(given_file_here) == [True, True]


def test_a_parameter_that_a_model_gives_back_gets_no_hook_in_every_step() -> None:
    codes = torch.nn.Parameter(torch.ones(3))
    made = 2 * codes
    assert [*_with_gradient((codes, {"loss": made}))] == [made]
    assert [*_with_gradient(codes)] == []


def test_outputs_that_a_loss_may_be_made_of_are_found_wherever_they_are() -> None:
    made = [torch.ones(2, requires_grad=True) * number for number in range(4)]

    @dataclass(slots=True)
    class Out:
        probs: torch.Tensor
        logits: list[torch.Tensor]

    found = [*_with_gradient({"both": Out(made[0], [made[1], torch.ones(1)]), "more": (made[2], made[3])})]
    assert all(one is other for one, other in zip(found, made, strict=True))


def test_a_forked_child_leaves_its_parents_job_alone(played: Played) -> None:
    assert played(forked_here) == [(0, False)] * 2


def test_a_state_that_nobody_closes_leaves_its_record(played: Played) -> None:
    assert played(dropped_here) == [("the job ended", 4)] * 2


def test_frozen_and_unused_parameters_do_not_hide_a_job_and_two_jobs_have_two_folders(
    played: Played, folder: str
) -> None:
    for rank, found in enumerate(played(watched_oddly_here)):
        (steps, slots, files), (steps_unused, slots_unused, both_files), (*_, all_files), static = found
        assert steps >= 9
        assert slots == {"2.weight", "2.bias"}
        assert (steps_unused, len(slots_unused)) == (11, 6), "DDP does not rebuild those"
        assert (static[0], static[1]) == (8, slots_unused)
        first, second, third = (f"{folder}/oddly/{name}flight-{rank:05d}.json" for name in ("", "2/", "3/"))
        assert (files, both_files, all_files) == ({first}, {first, second}, {first, second, third})


def test_a_gradient_of_the_output_is_no_backward_pass(played: Played) -> None:
    assert played(graded) == [[8, 5]] * 2


def test_a_model_whose_output_says_nothing_is_told_of_once(played: Played) -> None:
    for (warning,) in played(unseen):
        assert "no tensor with a gradient in what the model returns (SimpleNamespace)" in warning


def test_a_plain_job_is_recorded_whole(played: Played, folder: str) -> None:
    for found in played(plain_here):
        assert [number for number, *_ in found["steps"]] == list(range(10))
        for number, script, num_buckets, num_spans in found["steps"]:
            moments = [
                script.entered_us, script.forward_us, script.forward_end_us, script.backward_us,
                script.backward_end_us, script.averaged_us, script.optimizer_us, script.optimizer_end_us,
            ]  # fmt: skip
            assert None not in moments, (number, script)
            assert moments == sorted(moments), (number, script)
            assert script.passes == (1 if number < 6 else 3)
            assert (script.earlier_us > 0) == (number >= 6)
            assert script.input_us > 0 or number == 0
            assert num_spans in (0, num_buckets)
        assert any(num_spans for *_, num_spans in found["steps"])


def test_it_is_written_when_asked_and_at_the_end(played: Played, folder: str) -> None:
    played(plain_here)
    whole, asked = load_run(f"{folder}/plain"), load_run(f"{folder}/plain/asked")
    assert [len(each.steps) for each in whole] == [12, 12]
    assert [each.number for each in asked[0].steps] == [6, 7, 8, 9]
    assert whole[0].facts["written"] == "the job ended"
    assert whole[0].facts["buffer_bytes"] > 0
    assert whole[0].facts["bucket_cap_mb"] == pytest.approx(0.002, rel=0.01)
    assert not whole[0].ticks
    assert [tick.error_us < 100_000 for tick in whole[1].ticks] == [True, True]
    clocks = align(whole)
    ends = [[clocks[each.rank].common(step.done_us) for step in each.steps] for each in whole]
    assert median(abs(a - b) for a, b in zip(*ends, strict=True)) < 20_000  # a busy machine holds one up for longer


def test_a_compressed_job_is_recorded_task_by_task(played: Played) -> None:
    for found in played(compressed):
        for steps, num_bytes, bytes_sent in found:
            assert steps == ["comp", "dec", "flat.all_to_all", "flat.allgather"]
            assert num_bytes == bytes_sent > 0


def test_a_job_with_another_hook_is_observed(played: Played, folder: str) -> None:
    for found in played(observed_here):
        assert found["steps"] == 10  # DDP rebuilds its buckets in the second
        assert found["passes"] == {2}
        assert found["found"]["num_ranks"] == 2
    first, second = load_run(f"{folder}/observed")
    assert first.facts["observed"] is True
    assert [len(stretch.buckets) > 1 for stretch in first.stretches] == [True]
    assert [step.number for step in first.steps] == [step.number for step in second.steps]


def test_a_running_job_tells_when_it_is_asked(played: Played) -> None:
    for why, num_steps, has_overlap, text in played(asked_here):
        assert why == "asked for by SIGUSR1"
        assert num_steps >= 8
        assert has_overlap
        assert text.startswith("2 ranks")


def test_an_error_leaves_a_record(played: Played) -> None:
    assert played(failing_here) == ["the exchange failed"] * 2


def test_closing_waits_for_the_record_of_an_error(played: Played) -> None:
    assert played(failing_at_last_here) == [True, True]


def test_two_models_that_are_asked_and_have_no_folder_write_two_files(played: Played) -> None:
    for rank, found in enumerate(played(asked_for_without_a_folder_here)):
        assert found == [f"2/flight-{rank:05d}.json", f"flight-{rank:05d}.json"]


def test_what_a_device_hides_is_told_by_its_own_times() -> None:
    """Its host is through with backward long before it is."""
    there = replace(step(0, 1000.0), script=Script(backward_end_us=10.0, averaged_us=20.0))
    assert measured_overlap(there, on_device=True) == pytest.approx(1 - 10.0 / 11.0)
    assert measured_overlap(there) == 0.0
    assert measured_overlap(replace(there, spans=()), on_device=True) is None
    recorder = recorder_of_one_rank(host_copies=True)
    take(recorder, 0, [Interval(0, Lane.INTER_OUT, 0, 10)])
    assert recorder.overlap() == pytest.approx(0.9)


def test_exchanges_are_looked_at_as_seldom_as_their_number_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look costs .3 ms a bucket, and may take .4 % of the steps, as long as one step in 64 is looked at."""
    for num_buckets, step_ms, every in ((1, 1000, 1), (1, 100, 2), (2, 20, 16), (40, 20, 64)):
        averager: Any = Averager(Member(None, (0, 1), 0), dict.fromkeys(range(num_buckets), (0, None)))
        clock = [0]
        monkeypatch.setattr(averaging.time, "perf_counter_ns", lambda: clock[0])  # noqa: B023
        looked = []
        for iteration in range(256):
            clock[0] += int(1e6 * step_ms)
            if iteration == 130:
                clock[0] += int(60e9)  # an evaluation
            looked.append(averager.looks(iteration))
        assert looked[128:] == [iteration % every == 0 for iteration in range(128, 256)], (num_buckets, step_ms)


def recorder_of_one_rank(*, host_copies: bool = False) -> Recorder:
    groups: Any = SimpleNamespace(
        cluster=Cluster(1, 1), ranks=(0,), rank=0, num_ranks=1, cores=1.0, host_copies=host_copies, from_rank_0=str,
        all_objects=lambda mine: [mine], hosts=frozenset({"rank"}),
    )  # fmt: skip
    return Recorder(groups)


def take(recorder: Recorder, number: int, intervals: list[Any]) -> None:
    strategy = Strategy.uniform([TensorSpec("a", (3,))], Cluster(1, 1))
    bucket = Bucket(0, (Slot("a", 0, 3),))
    recorder.take(Record(number, Assignment(strategy), buckets=(bucket,), ready_ns=[1], done_ns=2, intervals=intervals))


def test_a_record_holds_as_many_steps_as_were_asked_for(tmp_path: Path) -> None:
    recorder = recorder_of_one_rank()
    for number in range(3):
        take(recorder, number, [])
    for last, numbers in ((0, []), (1, [2]), (2, [1, 2]), (9, [0, 1, 2])):
        there = recorder.write(tmp_path / "record.json", last)
        assert [each.number for each in Flight.load(there).steps] == numbers


def test_connections_are_looked_at_as_often_as_the_ring_is_half_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """By this rank alone: between looks at clocks, which ask others, are thousands of steps."""
    hosts = list[set[str]]()

    class Tally:
        def __init__(self, of: set[str]) -> None:
            hosts.append(of)

        def sent(self) -> Sent:
            return Sent(1, 1.0, 0.0, 50.0)

    monkeypatch.setattr("espresso.comm.connections.Tally", Tally)
    monkeypatch.setattr("espresso.live.recorder.connected", lambda: SimpleNamespace(addresses=("server",)))
    recorder = recorder_of_one_rank()
    for number in range(600):
        take(recorder, number, [])
    assert len(recorder.traffic) == 2
    assert hosts == [{"rank", "server"}], "what goes elsewhere says nothing of the job's"


@pytest.mark.timeout(30)
def test_a_signal_that_comes_while_the_ring_is_read_is_answered(tmp_path: Path) -> None:
    """The handler runs in the thread that it interrupts."""

    class Interrupting(list[Any]):
        def __bool__(self) -> bool:
            signal.raise_signal(signal.SIGUSR1)
            return False

    recorder = recorder_of_one_rank()
    take(recorder, 0, Interrupting())
    end = recorder.listen("SIGUSR1", tmp_path)
    recorder.overlap()
    end()
    assert len(list(tmp_path.iterdir())) == 1
