"""A started job: everything that all ranks make together at the start, and what happens around every iteration.

::

    front (DDP's hook)   bucket ──> Session.exchange ──> Executor ──> future
                                        Executor ──> Session.assign   what this iteration runs: the decider says
                                        Executor ──> Session.after    observer, recorder, decider, artifacts, checks

The session knows buckets and tensors' names. Which wrapper of PyTorch hands them over is the front's affair.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from espresso.comm.errors import DisagreementError, EspressoError
from espresso.comm.execute.assignment import Assignment, Record
from espresso.comm.execute.executor import Executor
from espresso.comm.groups import Groups
from espresso.comm.keep.store import FactorStore, ResidualStore, Velocities
from espresso.comm.nodes import node_key
from espresso.comm.parameter_server import Client, Link, connected
from espresso.comm.witness import worded
from espresso.compressors.schedule import Follower, Schedule, check_choices, translate
from espresso.live.agreement import agree, agree_on_epoch, check_replicas
from espresso.live.artifacts import Artifacts, own_folder, tell_profile
from espresso.live.codecs import HostCodecs
from espresso.live.config import Config
from espresso.live.fixed_planner import FixedPlanner, Verdict
from espresso.live.flush import Flush
from espresso.live.given import Given
from espresso.live.guard import OWED_CHECKS, Guard
from espresso.live.history import Event, History
from espresso.live.names import BoundModel
from espresso.live.observer import GradientClock, Observer
from espresso.live.online_search import OnlineSearch
from espresso.live.orderer import Work
from espresso.live.planner import AutoPlanner, Decider
from espresso.live.prepare import LOOK_EVERY, Kernels
from espresso.live.recorder import Recorder
from espresso.live.recording import Recording
from espresso.live.runtime import Runtime, runtime_of
from espresso.live.sampler import Sampler
from espresso.live.script import LossScale, StepGuard
from espresso.live.server_profile import measure_bearing
from espresso.strategies import NONE, RESIDUAL_DTYPES, Bucket, Choice, CompressorSpec, Strategy
from espresso.strategies.constraints import parse_forced
from espresso.strategies.option import RANK_DEVICES

logger = logging.getLogger("espresso")

_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()

TOLD_S = 1.0
"""For the last message of a rank that closes: the others begin theirs at the end of the same iteration."""


def _end(guard: weakref.ref[StepGuard]) -> None:
    if (found := guard()) is not None:
        found.remove()


class Session:
    """A job from its start to its end. Made by all ranks together; it is the executor's planner.

    Args:
        config: settings; equal on all ranks, but for the artifacts' directory.
        given: the compressor and the strategy, likewise.
        model: whose gradients are exchanged, likewise.
        process_group: the ranks that train together; None means the world.
        scale: the loss scale that gradients carry.
        epoch: as told so far.

    Attributes:
        groups, executor: process groups, and what carries plans out over them.
        store, velocities, factors: what is kept between iterations; velocities only with momentum correction.
        decider: says which strategy each iteration runs.
        search: automatic mode's; None where the strategy was given.
        observer: has seen every iteration.
        sampler: keeps numbers of the profiled iterations' gradients.
        recorder, recording: keep the last of them.
        history: what was decided when, and why.
        overlap_of: predicted for a strategy, for whoever asks again.
        is_compiled: whether the kernels are there that this job may run.
        profile_only: whether the job is only measured, as ``espresso profile`` has it, and stays plain.
        lay_buckets: has the front lay its buckets anew, of a size in MiB; whether it will.
        has_inputs: whether this rank takes the step of the latest iteration itself, as the front says: in ``join()``
            one without inputs takes none, and is given the parameters at the end.

    Raises:
        DisagreementError: ranks differ in model, compressor, strategy or a setting; it says in what.
        TopologyError, StrategyError: see there. Nothing is left behind then.
    """

    def __init__(
        self,
        config: Config,
        given: Given,
        model: BoundModel,
        process_group: dist.ProcessGroup | None,
        scale: LossScale,
        epoch: int | None,
    ) -> None:
        self.config, self.model, self.scale, self._pid = config, model, scale, os.getpid()
        self.lay_buckets: Callable[[float], bool] = lambda cap: False
        self.has_inputs = self._had_inputs = True
        self.runtime: Runtime = runtime_of(model.device)
        client = connected()
        with ExitStack() as undo:
            self.groups = self._make_groups(process_group, client)
            undo.callback(self.groups.close, wait=False)
            undo.push(self._tell_why)
            self.given = given.on(model.tensors, self.groups.cluster)
            tensors = {f"tensor {tensor.name!r}": (tensor.shape, tensor.dtype) for tensor in model.tensors}
            asked = {"compressor": self.given.named, "strategy": str(self.given), **config.shared, "epoch": epoch}
            self.profile_only = os.environ.get("ESPRESSO_PROFILE_ONLY") == "1"
            agree(self.groups, {**tensors, **asked, "ESPRESSO_PROFILE_ONLY": self.profile_only})
            is_given = isinstance(self.given.strategy, Strategy)  # nothing is forced then
            forced = set() if is_given else {spec for spec in config.terms.constraints.forced() if spec != NONE}
            schedule = Schedule(self.given.specs | forced)
            self.follower = Follower(schedule, epoch, config.steps_per_epoch)
            self.codecs: HostCodecs = self.runtime.codecs(config.offload_threads, config.offload_width)
            undo.callback(self.codecs.close)
            rule = schedule.correction
            # Momentum correction takes the whole of what was not sent, also at servers.
            gain = config.feedback_gain if rule is None else 1.0
            self.store = ResidualStore(transactional=config.transactional, storage=config.residual_dtype, gain=gain)
            self.velocities = None if rule is None else Velocities(rule, transactional=config.transactional)
            self.factors = FactorStore()
            folder = own_folder(config.artifacts_dir, model.module(), self.groups)
            self.artifacts = Artifacts(folder, self.groups, model.module, self.given.source)
            self.observer = Observer(self._make_clock)
            self.sampler = Sampler(model.tensors, self.groups.rank)
            self.recorder = Recorder(self.groups)
            self.history = History(self.groups.speaks, self.artifacts.history)
            self.search: OnlineSearch | None = None
            self.overlap_of: tuple[Strategy, float] | None = None
            self._flush = Flush(speaks=self.groups.speaks)
            self.bearing = None if client is None else measure_bearing(self.groups, client)
            self.decider: Decider = self._make_decider()
            if isinstance(self.decider, FixedPlanner):
                self._note_decided(0)
            self.guard: Guard | None = None
            servers = None if client is None else self._link(client)
            self._prepare_servers = None if servers is None else servers.prepare
            self.executor: Executor = self.runtime.executor(
                self.codecs,
                self.groups,
                self,
                store=self.store,
                seed=config.seed,
                timeout_s=config.timeout_s,
                velocities=self.velocities,
                servers=servers,
                factors=self.factors,
                offload_width=self.codecs.offload_width,
                **self._front(),
            )
            undo.callback(self.executor.close)
            if config.adapt and not (rule and rule.clip_norm):  # it sees gradients before they are clipped
                names = [tensor.name for tensor in model.wholes]
                side = self.executor.side
                self.guard = Guard(self.groups, model.tensors, names, self.store, side, self.velocities)
            self._goes_first = self._is_first_here()
            self._kernels = self._make_kernels(self.given.specs | set(config.terms.constraints.forced()))
            undo.callback(self._kernels.end)
            self.is_compiled = self._warm_up()  # last: who dies or hangs meanwhile is named
            there = folder
            if config.record_signal is not None:
                there = own_folder(config.artifacts_dir or ".", model.module(), self.groups)
            self.recording = Recording(self.recorder, self.executor, model, folder, config.record_signal, there)
            self._guard = StepGuard(model.names, has_momentum=rule is not None, error=lambda: self.executor.error)
            if (module := model.module()) is not None:  # whose parameters' ids others may have when it is gone
                weakref.finalize(module, _end, weakref.ref(self._guard)).atexit = False
            undo.pop_all()
        _OPEN.add(self)

    # -- the start -----------------------------------------------------------------------------------

    def _make_groups(self, process_group: dist.ProcessGroup | None, client: Client | None) -> Groups:
        shards, timeout_s, beside = self.model.shards, self.config.timeout_s, None
        if shards is not None:
            on_device = self.runtime.host_copies
            beside = Groups(
                shards.group, ranks_per_node=1, timeout_s=timeout_s, host_copies=on_device, before=process_group
            )
        return Groups(
            process_group,
            ranks_per_node=self.config.ranks_per_node,
            timeout_s=timeout_s,
            beside=beside,
            host_copies=self.runtime.host_copies,
            num_servers=0 if client is None else client.num_servers,
            num_colocated=0 if client is None else client.num_colocated,
            connections=self.config.connections,
        )

    def _tell_why(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Let the others know why this rank does not start: they wait for it."""
        if error is not None:
            self.groups.witness.tell(worded(error))

    def _front(self) -> dict[str, Any]:
        """What the executor does otherwise for shards: infs in one shard void the iteration in all of them."""
        beside = self.groups.beside
        if beside is None:
            return {}
        # As given: what runs now may compress later.
        lossy = not isinstance(self.decider, FixedPlanner) or self.decider.given.compresses
        return {"failed": "", "agree": beside.all_true if any(self.groups.everywhere(lossy)) else None}

    def _make_decider(self) -> Decider:
        strategy, tensors, groups = self.given.strategy, self.model.tensors, self.groups
        profile_only = self.profile_only
        if isinstance(strategy, Strategy) and not profile_only:
            strategy.check_model(tensors, groups.cluster)
            return FixedPlanner(strategy, groups, self.follower.in_force, history=self._watched)
        plain = Strategy.uniform(tensors, groups.cluster, partition_bytes=0)
        if groups.num_ranks == 1:
            logger.info("one rank: there is nothing to exchange, gradients stay as they are")
            if profile_only:
                tell_profile(why_not="one rank has no links to others; start the script with two or more")
            return FixedPlanner(plain, groups, verdict=Verdict("plain", "one rank: there is nothing to exchange"))
        self._plain = Assignment(plain)
        self.search = self._make_search()
        decider = AutoPlanner(
            plain,
            groups,
            self.search,
            warmup_steps=self.config.warmup_steps,
            profile_steps=self.config.profile_steps,
            race_steps=self.config.race_steps,
            race_rounds=self.config.race_rounds,
            decide_by=self.config.decide_by,
            on_profile=self.observer.profile,
            lay_buckets=lambda cap: self.lay_buckets(cap),
            history=self.history,
            profile_only=profile_only,
            adapt=self.config.adapt,
            # What starts late is searched for and raced once it has started.
            compresses_from=self.follower.schedule.start_step,
            others_race=lambda: self.others_race() if self._others() else None,
        )
        self._mark(decider, -1)
        return decider

    def _mark(self, decider: AutoPlanner, step: int) -> None:
        """Tell ``espresso profile`` how far the job came, once on every node."""
        groups = self.groups
        goes_first = groups.rank % groups.cluster.ranks_per_node == 0 and (not groups.beside or not groups.beside.rank)
        steps, needed = decider.measuring(step)
        if self.profile_only and goes_first:
            tell_profile(steps=steps, needed=needed, writes_here=groups.rank == 0)

    def others_race(self) -> int:
        """For how many iterations more other jobs of this process will race."""
        return max((each.to_race for each in self._others()), default=0)

    def _others(self) -> list[AutoPlanner]:
        """What decides for other jobs of this process, in automatic mode."""
        return [each.decider for each in list(_OPEN) if each is not self and isinstance(each.decider, AutoPlanner)]

    def _check_constraints(self) -> None:
        """Refuse what no option of this cluster can be, and name patterns that nothing matches."""
        from espresso.search.candidates import choices_for, raw_choices

        constraints, names = self.config.terms.constraints, [tensor.name for tensor in self.model.wholes]
        for warning in constraints.idle(names, self.groups.cluster) if self.groups.speaks else ():
            logger.warning("%s", warning)
        for kind in constraints.force.values():
            spec = parse_forced(kind)[0]
            if spec != NONE and not Schedule([spec]).is_steady:
                raise ValueError(
                    f"force: {kind!r} changes from epoch to epoch, and what is forced is one setting: leave"
                    " warmup_epochs out, or give the compressor as one that may be chosen"
                )
            cluster = self.groups.cluster
            options = raw_choices(cluster) if spec == NONE else choices_for(cluster, spec, RANK_DEVICES)
            if not constraints.of(options, kind):
                raise ValueError(f"force: {kind!r} is no option of {spec} on {self.groups.cluster}")

    def _make_search(self) -> OnlineSearch:
        self._check_constraints()
        search = OnlineSearch(
            self.groups,
            self.codecs,
            self.given.compressors,
            self.model.tensors,
            self.config,
            self.artifacts,
            self.observer,
            self.sampler,
            self.runtime,
            self.bearing,
        )
        search.follow(self.follower.in_force)
        search.measured_owed = self._measured_owed
        search.optimizer_adapts = lambda: self._guard.optimizer_adapts
        if self.store.gain is None:  # else all residuals come back at that rate, beside any optimizer
            search.gain_scale = lambda: self._guard.gain_scale
        search.corrects_momentum = self.velocities is not None
        return search

    def _measured_owed(
        self, without: int | None = None, scale: float | None = None
    ) -> Mapping[str, tuple[Choice, float]]:
        if self.guard is None or self.groups.beside is not None:  # one shard's says too little of a tensor
            return {}
        return self.guard.owed(OWED_CHECKS, without=without, scale=scale)

    def _make_clock(self) -> GradientClock | None:
        module = self.model.module()
        return None if module is None else self.runtime.clock(module, self.model.names, self.executor)

    def _link(self, client: Client) -> Link:
        namespace = self.groups.from_rank_0(client.new_namespace())
        return Link(client, self.groups.ranks, self.store, self.config.timeout_s, namespace, self.bearing)

    def _make_kernels(self, specs: Iterable[CompressorSpec]) -> Kernels:
        dtypes, runs = {tensor.dtype for tensor in self.model.tensors}, {*specs} - {NONE}
        kept = {spec.residual_dtype or self.config.residual_dtype for spec in runs}
        if self.config.terms.residual_budget_mb is not None:
            kept.update(RESIDUAL_DTYPES)
        packs = {CompressorSpec(dtype) for dtype in kept - {RESIDUAL_DTYPES[0]}}
        return Kernels(self.groups, self.codecs, runs | packs, dtypes, self._goes_first)

    def _is_first_here(self) -> bool:
        """Whether this is its host's first rank of the job: ranks_per_node may say otherwise, but the cache belongs to
        the host.
        """
        here, rank = node_key(), dist.get_rank()
        neighbours: list[int] = [theirs for host, theirs in self.groups.everywhere((here, rank)) if host == here]
        return rank == min(neighbours)

    def _warm_up(self) -> bool:
        """Have the kernels that this job may run; whether they are there, or are compiled beside its first steps."""
        # Before automatic mode measures there is nothing to encode.
        may_wait = isinstance(self.decider, AutoPlanner) and not self.profile_only and self.config.compile_beside
        if may_wait and self._prepare_servers is None and self.runtime.place.is_host:
            return self._kernels.begin()
        self._kernels.compile(self._prepare_servers)
        return True

    # -- called by a front ---------------------------------------------------------------------------

    def exchange(
        self, index: int, buffer: torch.Tensor, *, is_last: bool, describe: Callable[[], Bucket]
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket's buffer over all ranks, in place. See :meth:`Executor.reduce`."""
        describe = partial(self.sampler.see, buffer, describe)
        if self.guard is not None:
            describe = partial(self.guard.see, buffer, describe)  # what is compressed is described before it is
        return self.executor.reduce(index, buffer, is_last=is_last, grad_scale=self.scale, describe=describe)

    def end(self) -> torch.futures.Future[torch.Tensor]:
        """Say that the iteration had its last bucket, if none was said to be it. See :meth:`Executor.end`."""
        return self.executor.end()

    # -- called by the executor ----------------------------------------------------------------------

    def assign(self, iteration: int) -> Assignment:
        """What an iteration runs, by the compressors that are in force in it."""
        self._had_inputs = self.has_inputs  # on a device it is judged when the next one has begun
        self.recorder.begin()
        if self.follower.moves(iteration):
            self.decider.follow(self.follower.in_force)
        # Automatic mode begins when its kernels are there; until then steps are plain.
        waits = not self.is_compiled and not self.decider.decided
        assignment = self._plain if waits else self.decider.assign(iteration)  # told also where it is put off
        assignment = self._flush.assignment or assignment
        self.sampler.is_on = assignment.deferred
        if self.guard is not None:
            in_use = self.decider.decided and assignment.strategy == self.decider.strategy
            self.guard.begin(iteration, assignment, self.scale, in_use=in_use)
        return assignment

    def note(self, record: Record) -> None:
        """Take note of an iteration; nobody else is asked."""
        self.observer.take(record)
        self.recorder.take(record)

    def after(self, record: Record) -> Work | None:
        """Go on after an iteration. What is returned runs while all ranks are inside the same hook call."""
        flushed = self._flush.took(record, self.executor)
        if flushed:
            self.decider.skip(record)
        measures = self.profile_only and not self.decider.decided
        looks = not self.is_compiled and record.iteration % LOOK_EVERY == LOOK_EVERY - 1
        # Before the decider, which has something to send or not yet, as soon as this rank has what was gathered.
        was_summed = self.guard is not None and self.guard.end(record)
        works = [
            None if flushed else self.decider.after(record),
            self._look_for_kernels if looks else None,
            self.recorder.look if self.recorder.looks(record.iteration) else None,
        ]
        if measures and isinstance(self.decider, AutoPlanner):
            mark = partial(self._mark, self.decider, record.iteration)
            # Behind what the decider does: only then is it known whether the job is measured.
            if works[0] is None:
                mark()
            else:
                works.insert(1, mark)
        if self.guard is not None and was_summed:
            look = partial(self._look_at_averages, self.guard, record.iteration)
            # Behind what the decider does on all ranks; what only waits on this rank changes nothing.
            if self.guard.is_ready and works[0] is None:
                look()
            else:
                works.append(look)
        if self.decider.decided:
            self.artifacts.strategy(self.decider.strategy)
        every = self.config.check_every
        if every > 0 and record.iteration % every == every - 1:
            works.append(partial(self.check_replicas, is_compared=self._had_inputs))
        due = [work for work in works if work is not None]
        return partial(_run_all, due) if due else None

    def _look_for_kernels(self) -> None:
        self.is_compiled = self._kernels.are_there()

    def _look_at_averages(self, guard: Guard, step: int) -> None:
        """Have what the guard found out of its band go exact from the next iteration on, on all ranks alike."""
        alarms = guard.look()
        if alarms:
            name = self.decider.back_off([tensor for alarm in alarms for tensor in alarm.tensors], step)
            reason = "; ".join(alarm.reason for alarm in alarms)
            logger.warning("step %d: %s; these tensors go exact from now on", step, reason)
            self.history.add(step, Event.BACKED_OFF, reason, name, measured_us=self.observer.step_us)
        if isinstance(self.decider, AutoPlanner) and self.groups.beside is None:  # one shard's says too little
            self.decider.keep_to_budget()

    def _note_decided(self, step: int) -> None:
        verdict = self.decider.verdict
        assert verdict is not None
        self.history.add(step, Event.DECIDED, verdict.reason, verdict.name)

    # -- between two iterations ----------------------------------------------------------------------

    @property
    def flushes(self) -> bool:
        """Whether what is owed goes with the next gradients."""
        return self._flush.assignment is not None

    def flush(self) -> None:
        """Send all that is owed in the next iteration that counts: it is uncompressed, and the decider skips it."""
        self.executor.conclude()  # what a rank judged alone is told before: all ranks or none are in a flush then
        self._flush.begin(Strategy.uniform(self.model.tensors, self.groups.cluster, partition_bytes=0))
        self.executor.try_again()

    def use(self, strategy: Strategy) -> None:
        """Carry out ``strategy`` from the next iteration on; what it refuses the state's own method says."""
        self.executor.conclude()
        try:
            schedule = self._accepted(strategy)
        except (DisagreementError, TypeError, ValueError) as error:
            self._among_shards(error)
            raise
        strategy = self._among_shards(strategy)
        if not self.profile_only:  # else nothing would be measured
            self.adopt(strategy, schedule, self.executor.next_step, self.follower.epoch)

    def _among_shards(self, answer: Strategy | Exception) -> Strategy:
        """The strategy as all shards of the model take it; raises what any of them refuses."""
        if self.model.shards is not None and self.groups.beside is not None:
            return self.model.shards.told(answer, self.groups.beside)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _accepted(self, strategy: Strategy) -> Schedule:
        is_one = isinstance(strategy, Strategy)
        agree(self.groups, {"strategy": strategy.digest if is_one else f"{strategy!r:.80}"})
        if not is_one:
            raise TypeError(f"state.use takes a Strategy, got {strategy!r:.80}; Strategy.load(path) reads a file")
        return self.check(strategy)

    def check(self, strategy: Strategy) -> Schedule:
        """How a strategy's compressors change; ValueError if this job cannot run it."""
        strategy.check_model(self.model.tensors, self.groups.cluster)
        check_choices(strategy)
        schedule = Schedule(strategy.compressors)
        rule = None if self.velocities is None else self.velocities.rule
        if schedule.correction not in (None, rule):
            raise ValueError(
                f"this strategy asks for {schedule.correction}, the job has {rule or 'no momentum correction'};"
                " momentum belongs to the job and cannot change while it runs"
            )
        return schedule

    def lay_buckets_as_asked(self) -> None:
        """Have the buckets that the strategy in use was found for, where it says so."""
        cap = self.decider.strategy.bucket_cap_mb
        if cap is not None:
            self.lay_buckets(cap)

    @property
    def _watched(self) -> History | None:
        """Where it is told what changed, if that is to be watched."""
        return self.history if self.config.adapt else None

    def adopt(
        self, strategy: Strategy, schedule: Schedule, step: int, epoch: int | None, *, decides_on: bool = False
    ) -> None:
        """Carry out a strategy that was checked, from ``step`` on; if it ``decides_on``, until something changes."""
        self.observer.profile(False)  # a strategy may come while the job is measured
        with ExitStack() as undo:
            undo.push(self._tell_why)
            self._make_kernels(strategy.compressors).compile(self._prepare_servers)
        if decides_on and isinstance(self.decider, AutoPlanner):
            # What is given may come into force later, whatever was chosen by then; all shards follow the same.
            known = {choice.compressor for choice in strategy.known.values()}
            self.follower = self.follower.following(self.follower.schedule.also(known), step, epoch)
            self.decider.resume(translate(strategy, self.follower.in_force), self.follower.in_force)
        else:
            self.follower = self.follower.following(schedule, step, epoch)
            verdict = Verdict("resumed", "the strategy of the checkpoint") if decides_on else None
            self.decider = FixedPlanner(
                strategy, self.groups, self.follower.in_force, history=self._watched, verdict=verdict
            )
        self.lay_buckets_as_asked()
        self._note_decided(step)
        if self.groups.beside is not None:
            self.executor.agree = self.groups.beside.all_true

    def restart(self, step: int, owing: Iterable[str]) -> None:
        """Go on counting from a checkpoint's step, which may be one of before.

        Args:
            owing: the tensors of which some rank keeps something; equal on all ranks.
        """
        self.executor.restart(step, owing)
        self._flush = Flush(speaks=self.groups.speaks)  # what was to be sent is not what was loaded
        self.decider.restart()
        if self.guard is not None:
            self.guard.restart(step)

    def rescale(self, factors: Mapping[str, float]) -> None:
        """Multiply what is kept of the named tensors."""
        self.store.rescale(factors)
        self.runtime.place.settle()  # others read it on other streams

    def set_epoch(self, epoch: int, *, plans: bool = True) -> None:
        """Say which epoch begins. All ranks together, between two steps. If nobody ``plans`` by it, for checkpoints."""
        if plans and not self.follower.schedule.is_fixed:
            self.executor.conclude()
            agree_on_epoch(self.groups, epoch)
        self.follower.epoch = epoch

    def check_replicas(self, *, is_compared: bool = True) -> None:
        """Compare all parameters between the ranks that are to be compared, bit for bit. All ranks together."""
        check_replicas(self.groups, self.model.parameters if is_compared else {})

    # -- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop threads and free the process groups."""
        _OPEN.discard(self)
        self.observer.detach()
        self._guard.remove()
        self.recording.end()
        was_told = self._told()
        is_idle = self.executor.close() and was_told
        self.executor.leave()
        self._kernels.end()
        self.codecs.close()
        self.groups.close(wait=is_idle)

    def refuse(self, error: EspressoError) -> None:
        """Gradients came after the end: have the optimizer's next step raise, so that they are never applied."""
        self._guard.refuse(error)

    def _told(self) -> bool:
        """Whether what the ranks tell each other on the way has arrived; it needs no answer, so it does at once."""
        waiting = [each for each in (self.decider.watch, self.guard) if each is not None]
        until = time.monotonic() + TOLD_S
        while not all(each.is_told for each in waiting) and time.monotonic() < until:
            time.sleep(0.001)
        return all(each.is_told for each in waiting)

    def abandon(self) -> None:
        """Stop the threads of a job that nobody holds any more; any thread may find that, so none is waited for.

        A process that was forked since leaves them to the one that trains.
        """
        if os.getpid() != self._pid:
            return
        _OPEN.discard(self)
        self.observer.detach()
        self._guard.remove()
        self.recording.detach()
        self.executor.close()
        threading.Thread(target=self.recording.end, name="espresso-end").start()  # the process waits for what it writes
        for end in (self.executor.leave, self._kernels.end, self.codecs.close, self.groups.let_go):
            threading.Thread(target=end, name="espresso-end", daemon=True).start()


def _run_all(works: list[Work]) -> None:
    for work in works:
        work()
