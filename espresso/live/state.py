"""The state of the hook, and ``register``: where profiler, search and executor meet.

    state = espresso.register(ddp_model, compressor="dgc:ratio=0.01", strategy="auto")

One state serves one model. It is the ``state`` that DDP passes to ``espresso_hook``.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from espresso.comm.environment import read_environment
from espresso.comm.errors import DisagreementError, EspressoError, UnsupportedModelError
from espresso.comm.execute.executor import Executor, Record
from espresso.comm.groups import Groups
from espresso.comm.hook import espresso_hook
from espresso.comm.keep.factors import FactorStore
from espresso.comm.keep.store import ResidualStore
from espresso.comm.keep.velocities import Velocities
from espresso.comm.parameter_server import Link, connected
from espresso.compressors import registry
from espresso.compressors.schedule import Schedule, check_choices, translate
from espresso.live import checkpoint
from espresso.live.artifacts import Artifacts, mark_registered
from espresso.live.config import Config
from espresso.live.host_codecs import HostCodecs
from espresso.live.momentum_guard import MomentumGuard
from espresso.live.names import dtype_name, named_gradients, tensor_specs
from espresso.live.online_search import OnlineSearch
from espresso.live.planner import AutoPlanner, FixedPlanner
from espresso.live.profiler import GradientClock, Observation
from espresso.live.runtime import Runtime, runtime_of
from espresso.strategies import (
    NONE,
    Bucket,
    Cluster,
    CompressorSpec,
    Slot,
    Strategy,
    TensorSpec,
)

logger = logging.getLogger("espresso")

AUTO = "auto"

Policy = Callable[[tuple[TensorSpec, ...], Cluster], Strategy]
"""Makes a strategy from the model's tensors and the cluster, once both are known."""

COMPILE_PATIENCE_S = 600.0
"""A busy machine compiles the kernels of a compressor in minutes, and the ranks wait for each other."""

SETTLED_AFTER = 5
"""Iterations after the decision before one is recorded for people: caches and buffers are warm then."""

REMIND_AFTER = 1000
"""Steps after which a warm-up that nobody moves on is worth a warning."""

_LIVE: weakref.WeakSet[EspressoState] = weakref.WeakSet()


class EspressoState:
    """Everything the hook keeps: names, residuals, groups, the strategy in use.

    Args:
        compressor: spec of the compressor that automatic mode may use, ``name`` or ``name:key=value,…``.
        strategy: ``"auto"`` measures, searches and races; a path or a ``Strategy`` is carried out as it is; a
            function of the model's tensors and the cluster makes one when the state starts.
        process_group: the ranks that train together; None means the world.
        grad_scaler: a ``GradScaler`` whose loss scale the gradients carry; residuals are kept unscaled.
        **config: see :class:`~espresso.live.config.Config`.

    The functions in ``before_exchange`` are called with every bucket and the loss scale before the bucket is
    exchanged; they may change the bucket's buffer, and must not wait.

    The state may be built before the model is wrapped or the process group exists; names are bound by
    ``bind`` (``register`` does it), groups are made at the first call, by all ranks together.

    Example:
        >>> state = EspressoState(compressor="efsignsgd").bind(ddp_model)   # doctest: +SKIP
        >>> ddp_model.register_comm_hook(state, espresso_hook)              # doctest: +SKIP
    """

    def __init__(
        self,
        compressor: str | CompressorSpec = "efsignsgd",
        strategy: str | os.PathLike[str] | Strategy | Policy = AUTO,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: Any = None,
        **config: Any,
    ) -> None:
        self.config = Config.from_keywords(config)
        self.compressor = CompressorSpec.parse(compressor) if isinstance(compressor, str) else compressor
        self._strategy = strategy
        self._given: Strategy | Policy | str = (
            Strategy.load(Path(strategy)) if isinstance(strategy, str | os.PathLike) and strategy != AUTO
            else strategy
        )  # fmt: skip
        # An unknown id or parameter is an error here, not in the first step.
        registry.create(self.compressor)
        if isinstance(self._given, Strategy):
            check_choices(self._given)
        self._schedule = Schedule(self._given.compressors if isinstance(self._given, Strategy) else {self.compressor})
        self._process_group = process_group
        self._scaler = grad_scaler
        self._grad_scale: float | None = None
        self._epoch: int | None = None
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._names: dict[int, str] = {}
        self._tensors: tuple[TensorSpec, ...] = ()
        self._device = torch.device("cpu")
        self._buckets: dict[int, tuple[tuple[int, ...], Bucket]] = {}
        self._pending_state: dict[str, Any] | None = None
        self.before_exchange: list[Callable[[GradBucket, float], None]] = []
        self._pid = os.getpid()
        self._clear_runtime()
        _LIVE.add(self)

    def _clear_runtime(self) -> None:
        self._groups: Groups | None = None
        self._executor: Executor | None = None
        self._servers: Link | None = None
        self._planner: FixedPlanner | AutoPlanner | None = None
        self._store = ResidualStore(
            transactional=self.config.transactional,
            storage=self.config.residual_dtype,
            gain=self.config.feedback_gain,
        )
        self._velocities: Velocities | None = None
        self._factors = FactorStore()
        self._guard: MomentumGuard | None = None
        self._base: Strategy | None = None
        self._in_force: dict[CompressorSpec, CompressorSpec] = {}
        self._codecs: HostCodecs | None = None
        self._runtime: Runtime | None = None
        self._clock: GradientClock | None = None
        self._search: OnlineSearch | None = None
        self._artifacts: Artifacts | None = None
        self._observations: list[Observation] = []
        self._last: Record | None = None
        self._totals = {"bytes_sent": 0.0, "bytes_raw": 0.0, "steps": 0.0, "skipped": 0.0}
        self._step_us: list[float] = []
        self._artifacts_left = False
        self._marks = False
        self._decided_at: int | None = None
        self._closed = False

    # -- set-up ------------------------------------------------------------------------------------

    def bind(self, module: torch.nn.Module) -> EspressoState:
        """Learn the parameters' names from the model (wrapped in DDP or not).

        Raises:
            UnsupportedModelError: a parameter that cannot be exchanged, by name.
            StrategyError: the given strategy was made for another model.
        """
        parameters = named_gradients(module)
        self._module = weakref.ref(module)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._tensors = tensor_specs(parameters)
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        if isinstance(self._given, Strategy) and self._groups is None:
            self._given.check_model(self._tensors, self._given.cluster)
        return self

    def start(self) -> EspressoState:
        """Make process groups and compare the ranks' settings. All ranks together; the hook does it if you do not.

        Raises:
            DisagreementError: ranks differ in model, compressor, strategy or settings.
            StrategyError: the strategy was made for another model or cluster.
        """
        if self._groups is not None:
            return self
        if not self._names:
            raise EspressoError(
                "espresso does not know this model's parameter names: use espresso.register(ddp_model, …),"
                " or call state.bind(model) before the first backward pass"
            )
        self._runtime = runtime_of(self._device)
        client = connected()
        self._groups = Groups(
            self._process_group,
            ranks_per_node=self.config.ranks_per_node,
            timeout_s=self.config.timeout_s,
            host_copies=self._runtime.host_copies,
            num_servers=0 if client is None else client.num_servers,
            colocated=client is not None and client.colocated,
        )
        if callable(self._given):
            self._given = self._given(self._tensors, self._groups.cluster)
            self._schedule = Schedule(self._given.compressors)
            check_choices(self._given)
        self._agree()
        self._codecs = self._runtime.codecs(self.config.offload_threads)
        self._artifacts = Artifacts(self.config.artifacts_dir, self._groups)
        self._planner = self._make_planner()
        if client is not None:
            namespace = self._groups.from_rank_0(client.new_namespace())
            self._servers = Link(client, self._groups.ranks, self._store, self.config.timeout_s, namespace)
        self._warm_up()
        rule = self._schedule.correction
        if rule is not None:
            self._velocities = Velocities(rule, transactional=self.config.transactional)
            self._store.gain = 1.0  # also at servers
        self._executor = self._runtime.executor(
            self._codecs,
            self._groups,
            self._planner_with_bookkeeping(),
            store=self._store,
            seed=self.config.seed,
            timeout_s=self.config.timeout_s,
            velocities=self._velocities,
            servers=self._servers,
            factors=self._factors,
        )
        if self._velocities is not None:
            self._guard = MomentumGuard(_weakly(self._averages))
        # A state that is dropped without close() must not leave its threads behind.
        weakref.finalize(self, _abandon, self._executor, self._codecs).atexit = False
        if self._pending_state is not None:
            pending, self._pending_state = self._pending_state, None
            self.load_state_dict(pending)
        return self

    def _agree(self) -> None:
        """Every rank must have the same model, strategy and settings."""
        assert self._groups is not None
        given = self._given.digest if isinstance(self._given, Strategy) else AUTO
        mine = {
            "model": repr(sorted((t.name, t.shape, t.dtype) for t in self._tensors)),
            "compressor": str(self.compressor),
            "strategy": given,
            "settings": repr([v for k, v in sorted(vars(self.config).items()) if k != "artifacts_dir"]),
            "epoch": self._epoch,
        }
        everybody = self._groups.all_objects(mine)
        for rank, theirs in enumerate(everybody):
            for what, value in theirs.items():
                if value != everybody[0][what]:
                    shown = "" if what == "model" else f" ({everybody[0][what]!r} on rank 0, {value!r} on rank {rank})"
                    raise DisagreementError(f"rank {rank} has another {what} than rank 0{shown}; start all ranks alike")

    def _make_planner(self) -> FixedPlanner | AutoPlanner:
        assert self._groups is not None
        assert self._codecs is not None
        assert self._artifacts is not None
        profile_only = os.environ.get("ESPRESSO_PROFILE_ONLY") == "1"
        self._in_force = self._schedule.in_force(self._epoch_of(0), 0)
        if isinstance(self._given, Strategy) and not profile_only:
            self._given.check_model(self._tensors, self._groups.cluster)
            self._base = self._given
            return FixedPlanner(translate(self._base, self._in_force), self._groups)
        plain = Strategy.uniform(self._tensors, self._groups.cluster, partition_bytes=0)
        if self._groups.num_ranks == 1 and not profile_only:
            logger.info("one rank: there is nothing to exchange, gradients stay as they are")
            self._base = plain
            return FixedPlanner(plain, self._groups)
        config = self.config
        self._marks = profile_only and self._groups.rank % self._groups.cluster.ranks_per_node == 0
        self._mark(0)
        self._search = OnlineSearch(
            self._groups,
            self._codecs,
            self._searched_for(),
            self._tensors,
            config,
            self._artifacts,
            self._runtime,
        )
        return AutoPlanner(
            plain,
            self._groups,
            _weakly(self._find),
            # What starts late is searched for and raced once it has started.
            warmup_steps=max(config.warmup_steps, self._schedule.start_step - config.profile_steps),
            profile_steps=config.profile_steps,
            race_steps=config.race_steps,
            race_rounds=config.race_rounds,
            decide_by=config.decide_by,
            on_profile=_weakly(self._profile),
            profile_only=profile_only,
        )

    def _warm_up(self) -> None:
        """Compile the kernels this job may run, one rank of each host first, the others from its cache."""
        assert self._groups is not None
        assert self._codecs is not None
        specs = {self.compressor}
        if isinstance(self._given, Strategy):
            specs = self._given.compressors
        dtypes = {tensor.dtype for tensor in self._tensors}
        launch = read_environment()  # ranks_per_node may say otherwise, but the cache belongs to the host
        per_node = self._groups.cluster.ranks_per_node
        goes_first = self._groups.rank % per_node == 0 if launch is None else launch.local_rank == 0
        for turn in (True, False):
            if goes_first is turn:
                self._codecs.warm_up(specs - {NONE}, dtypes)
                if self._servers is not None:
                    self._servers.prepare(specs - {NONE}, dtypes)
            self._groups.barrier(max(self.config.timeout_s, COMPILE_PATIENCE_S))

    # -- the hook ----------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What ``espresso_hook`` does."""
        if not isinstance(bucket, GradBucket):
            raise UnsupportedModelError(
                f"the hook was given a {type(bucket).__name__} instead of a DDP bucket: torch.compile's own"
                " gradient hooks are not supported; compile the module inside DDP instead of the DDP wrapper"
            )
        if self._closed or os.getpid() != self._pid:
            raise EspressoError("this espresso state is closed (or was inherited by a forked process)")
        if self._executor is None:
            self.start()
        assert self._executor is not None
        if self.before_exchange:
            scale = self._scale()
            for prepare in self.before_exchange:
                prepare(bucket, 1.0 if scale is None else scale)
        return self._executor.reduce(
            bucket.index(),
            bucket.buffer(),
            is_last=bucket.is_last(),
            grad_scale=self._scale,
            describe=partial(self._describe, bucket),
        )

    def _describe(self, bucket: GradBucket) -> Bucket:
        index = bucket.index()
        parameters = bucket.parameters()
        ids = tuple(map(id, parameters))
        known = self._buckets.get(index)
        buffer = bucket.buffer()
        if known is not None and known[0] == ids and known[1].dtype == dtype_name(buffer.dtype):
            return known[1]
        slots = []
        offset = 0
        for parameter in parameters:
            name = self._names.get(id(parameter))
            if name is None:
                raise EspressoError(
                    f"bucket {index} holds a parameter of shape {tuple(parameter.shape)} that the bound model does"
                    " not have; bind the state to the model that DDP wraps"
                )
            slots.append(Slot(name, offset, parameter.numel()))
            offset += parameter.numel()
        if offset != buffer.numel():
            raise UnsupportedModelError(
                f"bucket {index} has {buffer.numel()} elements for parameters of {offset}: sparse or padded buckets"
                " are not supported"
            )
        described = Bucket(index, tuple(slots), dtype_name(buffer.dtype))
        self._buckets[index] = (ids, described)
        return described

    def _scale(self) -> float | None:
        if self._scaler is not None:
            return float(self._scaler.get_scale())
        return self._grad_scale

    def set_grad_scale(self, scale: float) -> None:
        """Tell the loss scale by hand, where no ``GradScaler`` was given; valid from the next backward pass.

        Raises:
            ValueError: not a positive finite number.
        """
        if not 0.0 < scale < float("inf"):
            raise ValueError(f"the loss scale must be positive and finite, got {scale!r}")
        self._grad_scale = scale

    # -- schedules ---------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins, as to a ``DistributedSampler``. All ranks together, between two steps.

        A compressor that warms up (``dgc:warmup_epochs=4``) changes its ratio with the epoch: from the next step on
        every rank plans anew, and in automatic mode searches and races again. With ``steps_per_epoch`` the
        state counts by itself and this need not be called.

        Raises:
            ValueError: not a whole number of at least 0.
            DisagreementError: ranks are in different epochs.
        """
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise ValueError(f"epoch must be a whole number of at least 0, got {epoch!r}")
        if self._groups is not None and not self._schedule.is_fixed:
            everybody = self._groups.all_objects(epoch)
            for rank, theirs in enumerate(everybody):
                if theirs != everybody[0]:
                    raise DisagreementError(
                        f"rank {rank} says that epoch {theirs} begins, rank 0 says {everybody[0]}; call"
                        " state.set_epoch on all ranks at the same step"
                    )
        self._epoch = epoch

    def _epoch_of(self, step: int) -> int:
        if self.config.steps_per_epoch is not None:
            return step // self.config.steps_per_epoch
        if step == REMIND_AFTER and self._epoch is None and not self._schedule.is_fixed:
            logger.warning(
                "the compressor warms up by epochs, but nobody called state.set_epoch(epoch) in %d steps, nor gave"
                " steps_per_epoch to register: its first ratio stays",
                step,
            )
        return self._epoch or 0

    def _follow(self, step: int) -> None:
        """Before a step: where the schedule changes a compressor, plan anew. The same on every rank."""
        if self._schedule.is_fixed:
            return
        now = self._schedule.in_force(self._epoch_of(step), step)
        if now == self._in_force:
            return
        self._in_force = now
        changed = ", ".join(map(str, now.values()))
        logger.info("from step %d on the compressor is %s", step, changed)
        assert self._groups is not None
        if self._base is not None:
            self._planner = FixedPlanner(translate(self._base, now), self._groups)
        elif isinstance(self._planner, AutoPlanner):
            assert self._search is not None
            before, self._search.compressor = self._search.compressor, self._searched_for()
            if self._search.compressor != before:
                self._planner.reconsider()

    def _searched_for(self) -> CompressorSpec:
        """What automatic mode measures: the compressor in force, or the one to come while nothing is."""
        found = self._in_force.get(self.compressor, self.compressor)
        return self.compressor if found == NONE else found

    def _averages(self, parameter: int) -> bool:
        return not self._closed and parameter in self._names

    # -- bookkeeping -------------------------------------------------------------------------------

    def _planner_with_bookkeeping(self) -> _Bookkeeping:
        return _Bookkeeping(self)

    def _profile(self, begin: bool) -> None:
        if begin:
            module = None if self._module is None else self._module()
            if module is not None and self._clock is None:
                assert self._runtime is not None
                assert self._executor is not None
                self._clock = self._runtime.clock(module, self._names, self._executor)
        elif self._clock is not None:
            self._clock.detach()
            self._clock = None

    def _find(self, records: Any) -> Any:
        assert self._search is not None
        return self._search(records, self._observations)

    def use(self, strategy: Strategy) -> None:
        """Carry out ``strategy`` from the next iteration on. All ranks, between the same two iterations.

        Residuals move over; what has no place in the new strategy is sent with the next gradients.

        Raises:
            StrategyError: it was made for another model or cluster.
            ValueError: an unknown compressor, or another momentum than the job has.
            EspressoError: the state has not started.
        """
        if self._groups is None or self._executor is None:
            raise EspressoError("the exchange has not started; call state.start() before state.use(…)")
        assert self._codecs is not None
        strategy.check_model(self._tensors, self._groups.cluster)
        check_choices(strategy)
        schedule = Schedule(strategy.compressors)
        rule = None if self._velocities is None else self._velocities.rule
        if schedule.correction not in (None, rule):
            raise ValueError(
                f"this strategy asks for {schedule.correction}, the job has {rule or 'no momentum correction'};"
                " momentum belongs to the job and cannot change while it runs"
            )
        self._codecs.warm_up(strategy.compressors - {NONE}, {tensor.dtype for tensor in self._tensors})
        step = self._executor.next_step
        self._schedule, self._base = schedule, strategy
        self._in_force = schedule.in_force(self._epoch_of(step), step)
        self._planner = FixedPlanner(translate(strategy, self._in_force), self._groups)

    def resume(self, strategy: Strategy) -> None:
        """Go on with the strategy of a checkpoint: it names what was in force then, the schedule is given now."""
        if not self._schedule.is_fixed:
            named = {s: self.compressor for s in strategy.compressors if s.name == self.compressor.name}
            strategy = translate(strategy, named)
        self.use(strategy)

    def _and_then(self, record: Record, work: Any) -> Any:
        """The planner's work, then ours: artefacts once decided, and the replica check."""
        every = self.config.check_every
        check = every > 0 and record.iteration % every == every - 1
        leave = self._artifacts_due(record)
        if work is None and not check and not leave:
            return None

        def both() -> None:
            if work is not None:
                work()
            if leave:
                self._leave_artifacts(record)
            if check:
                self.check_replicas()

        return both

    def _artifacts_due(self, record: Record) -> bool:
        """A steady iteration some steps after the decision, where artefacts are wanted."""
        if self._artifacts_left or self.config.artifacts_dir is None or not self.decided:
            return False
        if self._decided_at is None:
            self._decided_at = record.iteration
        compresses = self.strategy is not None and self.strategy.num_compressed > 0
        if compresses and not (record.plan is not None and record.intervals):
            return False
        return record.iteration >= self._decided_at + SETTLED_AFTER

    def _leave_artifacts(self, record: Record) -> None:
        assert self._artifacts is not None
        assert self.strategy is not None
        self._artifacts_left = True
        self._artifacts.strategy(self.strategy)
        offset = 0.0 if self.job is None else self.job.bucket_ready_us[0]
        self._artifacts.measured(record, record.ready_ns[0] - int(offset * 1e3))

    def _took(self, record: Record) -> None:
        """Note an iteration: totals, step time, and the clock's readings while profiling."""
        previous, self._last = self._last, record
        self._totals["bytes_sent"] = float(record.bytes_sent)
        self._totals["bytes_raw"] = float(record.bytes_raw)
        self._totals["steps"] += 1
        self._totals["skipped"] += not record.finite
        if previous is not None:
            self._step_us = [*self._step_us[-19:], (record.done_ns - previous.done_ns) / 1e3]
        if record.assignment.deferred and previous is not None:
            self._observations.append(self._observe(record, previous))
        if self._clock is not None:
            self._clock.begin()
        if not self.decided:
            self._mark(record.iteration + 1)

    def _mark(self, steps: int) -> None:
        """Tell ``espresso profile`` on this node how far the script came."""
        if self._marks and self._groups is not None:
            needed = self.config.warmup_steps + self.config.profile_steps
            mark_registered(steps, needed, writes_here=self._groups.rank == 0)

    def _observe(self, record: Record, previous: Record) -> Observation:
        clock = self._clock
        ready = {} if clock is None else dict(clock.ready_ns)
        for bucket, at in zip(record.buckets, record.ready_ns, strict=True):
            for slot in bucket.slots:
                ready.setdefault(slot.tensor, at)
        begin = min(ready.values())
        forward = previous.done_ns if clock is None or clock.forward_ns < previous.done_ns else clock.forward_ns
        return Observation(
            {name: (at - begin) / 1e3 for name, at in ready.items()},
            tuple((at - begin) / 1e3 for at in record.ready_ns),
            (begin - forward) / 1e3,
            (forward - previous.done_ns) / 1e3,
        )

    # -- what users look at ------------------------------------------------------------------------

    @property
    def decided(self) -> bool:
        """Whether the strategy is settled (at once for a given one)."""
        return self._planner is not None and self._planner.decided

    @property
    def strategy(self) -> Strategy | None:
        """The strategy in use; None before the first step."""
        return None if self._planner is None else self._planner.strategy

    @property
    def verdict(self) -> str:
        """What automatic mode decided and why, in one sentence; empty before that."""
        verdict = None if self._planner is None else self._planner.verdict
        return "" if verdict is None else f"{verdict.name}: {verdict.reason}"

    @property
    def advice(self) -> str:
        """What to set for a shorter iteration, DDP's bucket size for one (rank 0, automatic mode); else empty."""
        return "" if self._search is None else self._search.advice

    @property
    def job(self) -> Any:
        """The measured :class:`~espresso.model.job.Job` (rank 0, after profiling), else None."""
        return None if self._search is None else self._search.job

    @property
    def cluster(self) -> Cluster | None:
        """The cluster this job runs on; None before ``start``."""
        return None if self._groups is None else self._groups.cluster

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The name of a bound model's parameter; None for any other tensor."""
        return self._names.get(id(parameter))

    def rescale_residuals(self, factors: Mapping[str, float]) -> None:
        """Multiply what is kept of the named tensors at every site. All ranks alike, between iterations.

        Residuals at parameter servers are reached through the first rank, which waits for their answer.
        """
        self._store.rescale(factors)

    @property
    def error(self) -> EspressoError | None:
        """The first error of the exchange, if there was one."""
        return None if self._executor is None else self._executor.error

    def metrics(self) -> dict[str, float]:
        """Flat figures for any logger: bytes of the latest step, residual norm, predicted and measured step time."""
        self._conclude()
        predicted = measured = 0.0
        verdict = None if self._planner is None else self._planner.verdict
        if verdict is not None:
            predicted = verdict.predicted_us.get(verdict.name, 0.0)
            if verdict.name == "plain" and self._search is not None:
                predicted = self._search.uncompressed_us
        if self._step_us:
            measured = sorted(self._step_us)[len(self._step_us) // 2]
        strategy = self.strategy
        return {
            "espresso/bytes_sent": self._totals["bytes_sent"],
            "espresso/bytes_raw": self._totals["bytes_raw"],
            "espresso/residual_norm": self._store.norm(),
            "espresso/residual_bytes": float(self._store.num_bytes),
            "espresso/velocity_bytes": 0.0 if self._velocities is None else float(self._velocities.num_bytes),
            "espresso/predicted_step_us": predicted,
            "espresso/measured_step_us": measured,
            "espresso/steps": self._totals["steps"],
            "espresso/skipped_steps": self._totals["skipped"],
            "espresso/tensors_compressed": 0.0 if strategy is None else float(strategy.num_compressed),
            "espresso/tensors_through_servers": 0.0 if strategy is None else float(strategy.num_through_servers),
            "espresso/decided": float(self.decided),
        }

    def check_replicas(self) -> None:
        """Compare all parameters between ranks, bit for bit. All ranks together.

        Raises:
            DisagreementError: names the rank and the first tensor that differs from rank 0.
        """
        module = None if self._module is None else self._module()
        if module is None or self._groups is None:
            return
        checksums = {name: checkpoint.checksum(p) for name, p in named_gradients(module).items()}
        everybody = self._groups.all_objects(checksums)
        for rank, theirs in enumerate(everybody):
            for name, value in theirs.items():
                if value != everybody[0][name]:
                    raise DisagreementError(f"parameter {name!r} on rank {rank} differs from rank 0: replicas diverged")

    # -- checkpoints -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, counters and strategy. Per rank: save one file for each.

        For one file that any number of ranks can load, see :meth:`gather_state_dict`.
        """
        self._conclude()
        return checkpoint.save(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict()`` of the same rank, or from ``gather_state_dict()`` of any number of ranks.

        Raises:
            CheckpointError: another rank's state, another model, or a malformed one; nothing is changed then.
        """
        if self._groups is None:
            self._pending_state = checkpoint.check(state)
            return
        self._conclude()
        checkpoint.load(self, state)

    def gather_state_dict(self) -> dict[str, Any]:
        """All ranks' residuals in one dictionary, the same on every rank. All ranks together."""
        self._conclude()
        return checkpoint.gather(self)

    def _conclude(self) -> None:
        """On a GPU the last iteration may be launched but not judged: residuals are read only after that."""
        if self._executor is not None:
            self._executor.conclude()

    # -- end of life -------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop threads and free the process groups. Safe at any time, and more than once."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._clock is not None:
            self._clock.detach()
        if self._guard is not None:
            self._guard.remove()
        # Without an executor it is still being set up, perhaps by another thread that waits for everybody.
        is_idle = self._executor is not None and self._executor.close()
        if self._codecs is not None:
            self._codecs.close()
        if self._groups is not None:
            self._groups.close(wait=is_idle)

    def __getstate__(self) -> dict[str, Any]:
        """Groups, threads and the model stay behind; settings, strategy and residuals travel."""
        return {
            "compressor": str(self.compressor),
            "strategy": self._given.to_json() if isinstance(self._given, Strategy) else self._given,
            "config": dict(vars(self.config)),
            "state": self._pending_state if self._groups is None else self.state_dict(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        strategy = state["strategy"]
        given = Strategy.from_json(strategy) if isinstance(strategy, dict) else strategy
        self.__init__(state["compressor"], given, **state["config"])  # type: ignore[misc]
        if state["state"] is not None:
            self.load_state_dict(state["state"])


def _abandon(executor: Executor, codecs: HostCodecs) -> None:
    """Stop the threads of a state that was collected; on a thread of its own, since any thread may collect."""
    executor.close()
    threading.Thread(target=codecs.close, name="espresso-end", daemon=True).start()


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The bound method, without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        assert found is not None
        return found(*arguments)

    return call


class _Bookkeeping:
    """Passes calls on to the state's planner, and lets the state follow its schedule and take notes."""

    def __init__(self, state: EspressoState) -> None:
        self._state = weakref.proxy(state)

    def assign(self, iteration: int) -> Any:
        self._state._follow(iteration)
        return self._state._planner.assign(iteration)

    def after(self, record: Record) -> Any:
        self._state._took(record)
        work = self._state._planner.after(record)
        return self._state._and_then(record, work)


def register(
    ddp_model: DistributedDataParallel,
    compressor: str | CompressorSpec = "efsignsgd",
    strategy: str | os.PathLike[str] | Strategy | Policy = AUTO,
    process_group: dist.ProcessGroup | None = None,
    grad_scaler: Any = None,
    **config: Any,
) -> EspressoState:
    """Make a DDP model exchange its gradients through espresso. The one line. All ranks together.

    Args: as for :class:`EspressoState`; ``process_group`` defaults to the one DDP was given.

    Returns:
        The state, already registered as DDP's communication hook.

    Raises:
        TypeError: not a DDP model, or an unknown setting.
        UnsupportedModelError, StrategyError, DisagreementError, TopologyError: see there.

    Example:
        >>> state = espresso.register(ddp_model, compressor="dgc:ratio=0.01")   # doctest: +SKIP
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            f"espresso.register needs a DistributedDataParallel model, got {type(ddp_model).__name__};"
            " wrap the model in DistributedDataParallel first"
        )
    group = ddp_model.process_group if process_group is None else process_group
    state = EspressoState(compressor, strategy, group, grad_scaler, **config)
    state.bind(ddp_model)
    state.start()
    ddp_model.register_comm_hook(state, espresso_hook)
    return state


@atexit.register
def _close_all() -> None:
    for state in list(_LIVE):
        state.close()
