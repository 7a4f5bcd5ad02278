"""DDP's state of a job: settings before the start, a session from then on.

One state serves one model. It is the ``state`` that DDP passes to ``espresso_hook``.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]

from espresso.comm.environment import told_world_size
from espresso.comm.errors import EspressoError, UnsupportedModelError
from espresso.comm.hook import Front
from espresso.live import resume
from espresso.live.agreement import agree
from espresso.live.checkpoint import Checkpoint
from espresso.live.config import Config, Settings
from espresso.live.given import AUTO, CompressorLike, Given, StrategyLike
from espresso.live.names import BoundModel
from espresso.live.parts import NUM_PARTS, CheckpointError
from espresso.live.script import LossScale, Scaler
from espresso.live.session import Session
from espresso.live.view import View
from espresso.strategies import CompressorSpec, Strategy

logger = logging.getLogger("espresso")

_LIVE: weakref.WeakSet[EspressoState] = weakref.WeakSet()


def why_off() -> str:
    """What turns espresso off in this process; empty if nothing does."""
    disable = os.environ.get("ESPRESSO_DISABLE", "0")
    return f"ESPRESSO_DISABLE={disable}" if disable not in ("", "0") else ""


class EspressoState(View):
    """What the hook is given: settings, the model's names, and the session once it has started.

    Args:
        compressor: spec of the compressor that automatic mode may use, ``name`` or ``name:key=value,…``; several in a
            list, of which every tensor takes one or none; or ``"auto"`` for a list of espresso's own.
        strategy: ``"auto"`` measures, searches and races; a path or a ``Strategy`` is carried out as it is; a
            function of the model's tensors and the cluster makes one when the state starts.
        process_group: the ranks that train together; None means the world.
        grad_scaler: a ``GradScaler`` whose loss scale the gradients carry; residuals are kept unscaled.
        **config: see :class:`~espresso.live.config.Config`.

    A state that is off (``ESPRESSO_DISABLE=1``, or one process without DDP) averages as plain DDP does; a checkpoint
    that it was given goes through it unchanged.

    The state may be built before the model is wrapped or the process group exists; names are bound by
    ``bind`` (``register`` does it), groups are made at the first call, by all ranks together.

    Example:
        >>> state = EspressoState(compressor="efsignsgd").bind(ddp_model)   # doctest: +SKIP
        >>> ddp_model.register_comm_hook(state, espresso_hook)              # doctest: +SKIP
    """

    def __init__(
        self,
        compressor: CompressorLike = AUTO,
        strategy: StrategyLike = AUTO,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: Scaler | None = None,
        **config: Unpack[Settings],
    ) -> None:
        self.config = Config.from_keywords(dict(config))
        self._given = Given.of(compressor, strategy)
        if not (process_group is None or isinstance(process_group, dist.ProcessGroup)):
            raise TypeError(f"process_group must be a torch.distributed group, got {process_group!r:.80}")
        self._process_group = process_group
        if not (grad_scaler is None or hasattr(grad_scaler, "get_scale")):
            raise TypeError(f"grad_scaler must have a get_scale(), as torch.amp.GradScaler, got {grad_scaler!r:.80}")
        self._scale = LossScale(grad_scaler)
        self._epoch: int | None = None
        self._has_later_epoch = False  # than the checkpoint to go on from
        self._pending: Checkpoint | None = None
        self._strict = True
        self._model: BoundModel | None = None
        self._front: Front | None = None
        self._session: Session | None = None
        self._off = why_off()
        self._leaves = self._closed = False
        self._over = 1.0
        self._pid = os.getpid()
        self._before_exchange: list[Callable[[GradBucket, float, bool], None]] = []
        _LIVE.add(self)

    @property
    def compressor(self) -> CompressorSpec:
        """The one that automatic mode may use; of several the first."""
        return self._given.compressor

    @property
    def compressors(self) -> tuple[CompressorSpec, ...]:
        """All that automatic mode may use."""
        return self._given.compressors

    @property
    def before_exchange(self) -> list[Callable[[GradBucket, float, bool], None]]:
        """Functions that are called with every bucket of DDP's, the loss scale, and whether it is the first of the
        pass, before the bucket is exchanged; they may change the bucket's buffer, and must not wait.

        Raises:
            UnsupportedModelError: the model is sharded by FSDP, which has no such buckets.
        """
        if self._model is not None and self._model.shards is not None:
            raise UnsupportedModelError(
                "scale_residuals and CompressedAdam change gradients before their exchange, which espresso does with"
                " DDP alone; train this FSDP model without, with another optimizer than CompressedAdam"
            )
        return self._before_exchange

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def is_joining(self) -> bool:
        """Whether the model is in DDP's ``join()``."""
        return self._front is not None and self._front.is_joining

    # -- the start -----------------------------------------------------------------------------------

    def bind(self, module: torch.nn.Module | BoundModel) -> EspressoState:
        """Learn the parameters' names from the model (wrapped in DDP or not; or bound by another front).

        Raises:
            UnsupportedModelError: a parameter that cannot be exchanged, by name.
            StrategyError: the given strategy was made for another model.
        """
        model = module if isinstance(module, BoundModel) else BoundModel.of(module)
        strategy = self._given.strategy
        if isinstance(strategy, Strategy) and self._session is None:
            strategy.check_model(model.tensors, strategy.cluster)
        self._model = model
        _LIVE.add(self)
        if self._front is not None:
            self._front.detach()
        self._front = None if isinstance(module, BoundModel) else Front(module, model.names)
        if self._front is None:
            self._off = ""  # nobody else averages what another front hands over
        else:
            weakref.finalize(self, self._front.detach).atexit = False
        return self

    def came_from(self, source: Path) -> None:
        """The file of the strategy that was given, where a front has read it: it is left as it is."""
        self._given = replace(self._given, source=source)

    def turn_off(self, why: str) -> EspressoState:
        """Average as plain DDP does, from the start."""
        self._off = why
        return self

    def start(self) -> EspressoState:
        """Make process groups and compare the ranks' settings. All ranks together; the hook does it if you do not.

        Raises:
            DisagreementError: ranks differ in model, compressor, strategy or settings.
            StrategyError: the strategy was made for another model or cluster.
        """
        if self._session is not None or self._off:
            return self
        if self._model is None:
            raise EspressoError(
                "espresso does not know this model's parameter names: use espresso.register(ddp_model, …),"
                " or call state.bind(model) before the first backward pass"
            )
        session = Session(self.config, self._given, self._model, self._process_group, self._scale, self._epoch)
        try:
            begins = "none" if self._pending is None else "one to go on from"
            agree(session.groups, {"checkpoint": begins, "an epoch since it was loaded": self._has_later_epoch})
            if self._pending is not None:
                resume.load(session, self._pending, strict=self._strict)
                if self._has_later_epoch:
                    session.set_epoch(self._epoch or 0)
        except BaseException:
            session.close()
            raise
        self._session, self._pending = session, None
        # A state that is dropped without close() must not leave its threads behind.
        self._abandon = weakref.finalize(self, session.abandon)
        self._abandon.atexit = False
        return self

    def running(self) -> Session:
        """The job, started if it was not; what a front hands its buckets to.

        Raises:
            EspressoError: it was closed, or this process was forked off the one that trains.
        """
        if self._closed or os.getpid() != self._pid:
            error = EspressoError(
                "this espresso state is closed (or was inherited by a forked process); register the model again here"
            )
            if self._session is not None:
                self._session.refuse(error)
            raise error
        return self._session or self.start().session

    # -- the hook ------------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What ``espresso_hook`` does."""
        Front.check(bucket)
        if self._off or (self._leaves and self._left(bucket)):
            return self._average(bucket)
        session = self.running()
        front = self._front
        assert front is not None
        arrived = front.take(bucket, session.executor.end)
        if arrived.index == 0:
            self._scale.begin()
            session.has_inputs = front.has_inputs()
            session.store.waits = front.drops_averages and session.runtime.place.is_host
        if session.store.waits:
            session.store.hears(*front.without_gradient(bucket))
        if self._before_exchange:
            scale = self._scale()
            for prepare in self._before_exchange:
                prepare(bucket, 1.0 if scale is None else scale, arrived.index == 0)
        if front.averages_over_some and arrived.index == 0:
            session.executor.conclude()  # what a rank judged alone is told before, on all ranks
            self._over = session.groups.num_ranks / max(sum(session.groups.all_objects(front.has_inputs())), 1)
        future = session.exchange(
            arrived.index, arrived.buffer, is_last=arrived.is_last, describe=lambda: front.describe(bucket, arrived)
        )
        return future.then(partial(_times, self._over)) if front.averages_over_some else future

    def counts(self, bucket: GradBucket) -> None:
        """What a bucket has is exchanged as it is, also of parameters that got no gradient in this step."""
        if self._session is not None:
            names = (self.name_of(parameter) for parameter in bucket.parameters())
            self._session.store.silent.difference_update(name for name in names if name is not None)

    def _average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """As plain DDP does, which in ``join()`` divides by what its hooks are not told."""
        front, group = self._front, self._process_group
        if front is None or not front.averages_over_some:
            return Front.average(bucket, group)
        if front.take(bucket, _nothing_follows).index == 0:
            with_inputs = torch.tensor([float(front.has_inputs()), 1.0], device=bucket.buffer().device)
            dist.all_reduce(with_inputs, group=group)
            those, everybody = with_inputs.tolist()
            self._over = everybody / max(those, 1.0)
        return Front.average(bucket, group).then(partial(_times, self._over))

    def set_grad_scale(self, scale: float) -> None:
        """Tell the loss scale by hand, where no ``GradScaler`` was given; valid from the next backward pass.

        Raises:
            ValueError: not a positive finite number.
        """
        self._scale.set(scale)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins, as to a ``DistributedSampler``. All ranks together, between two steps.

        A compressor that warms up (``dgc:warmup_epochs=4``) changes its ratio with the epoch: from the next step on
        every rank plans anew, and in automatic mode searches and races again. With ``steps_per_epoch`` the
        state counts by itself and this need not be called.

        Raises:
            ValueError: not a whole number of at least 0.
            DisagreementError: ranks are in different epochs.
        """
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch must be a whole number of at least 0, got {epoch!r}")
        if self._session is not None:
            self._session.set_epoch(epoch, plans=not self.is_off)
        self._epoch, self._has_later_epoch = epoch, self._pending is not None

    def use(self, strategy: Strategy) -> None:
        """Carry out ``strategy`` from the next iteration on. All ranks, between the same two iterations.

        Residuals move over; what has no place in the new strategy is sent with the next gradients.

        Raises:
            StrategyError: it was made for another model or cluster.
            DisagreementError: another rank was given another one.
            TypeError: no strategy.
            ValueError: an unknown compressor, or another momentum than the job has.
            EspressoError: the state has not started.
        """
        if not self.is_off:
            self.session.use(strategy)

    def flush(self) -> None:
        """Send all that is owed with the next gradients, exactly: that step is not compressed. All ranks, between the
        same two steps. A step with an inf or NaN does not count; then it is the one after it. On a CPU tensors that a
        step does not use (``find_unused_parameters``) are waited for, 100 steps at most; a warning names them.
        """
        if self._session is not None:
            self._session.flush()

    def unregister(self) -> None:
        """Go back to DDP's plain averaging. All ranks, between the same two steps.

        The next step sends what is owed, exactly, as :meth:`flush` does; then threads and process groups end. DDP keeps
        the hook, which averages as DDP does.
        """
        if self._model is not None and self._model.shards is not None:
            raise EspressoError("nobody else averages the replicas of an FSDP model: it cannot be unregistered")
        self._leaves = True
        self.flush()

    def _left(self, bucket: GradBucket) -> bool:
        """Whether what is owed has been sent, after :meth:`unregister`; the first to know closes the session."""
        session, front = self._session, self._front
        if session is not None and front is not None and not self._closed and front.begins(bucket):
            session.executor.conclude()
            if not session.flushes:
                session.groups.barrier()  # others may still be told how the last step went
                self.close()
        self._has_left = session is None or self._closed
        return self._has_left

    # -- names and residuals -------------------------------------------------------------------------

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The name of a bound model's parameter; None for any other tensor."""
        return None if self._model is None else self._model.names.get(id(parameter))

    def rescale_residuals(self, factors: Mapping[str, float]) -> None:
        """Multiply what is kept of the named tensors at every site. All ranks alike, between iterations.

        Residuals at parameter servers are reached through the first rank, which waits for their answer: of these a save
        is right only once the next step is over.

        Raises:
            ValueError: no tensor of the model has such a name, or a factor is not finite.
        """
        if self._session is not None:
            known = {tensor.name for tensor in self._session.model.wholes}
            for name, factor in factors.items():
                if name not in known or not math.isfinite(factor):
                    what = "is not finite" if name in known else "is for no tensor of this model"
                    raise ValueError(f"the factor {factor!r} of {name!r} {what}")
            self._session.executor.conclude()  # on a GPU the last step may not be judged yet
            self._session.rescale(factors)

    def __repr__(self) -> str:
        given = self._given.strategy
        asked = AUTO if given is None else repr(given) if isinstance(given, Strategy) else "a function"
        if self._closed or self._off:
            now = "closed" if self._closed else f"off ({self._off})"
        elif self._session is None:
            now = "not started"
        else:
            now = self.verdict or "measuring"
        return f"<EspressoState: {self._given.named}, strategy {asked}; {now}>"

    # -- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, counters and strategy: save one file for each rank.

        Or give the state itself to ``torch.distributed.checkpoint``, which saves it sharded, and loads it on any number
        of ranks. Nothing is copied before it is written; training may go on meanwhile. For one file with everything see
        :meth:`gather_state_dict`. Accelerate keeps what the first rank answers: it is given that form.

        Example:
            >>> dcp.save({"espresso": state}, checkpoint_id=path)   # doctest: +SKIP
        """
        holds = self._session is not None or self.is_off
        if holds and sys._getframe(1).f_globals.get("__name__") == "accelerate.checkpointing":
            return self.gather_state_dict()
        return self._saved(resume.place(self._session, self._process_group).parts).to_dict()

    def _saved(self, numbers: Iterable[int]) -> Checkpoint:
        if self._session is not None and self._pending is None:
            return resume.saved(self._session).with_parts(numbers)
        if self._pending is not None:  # parts that it was never given are not empty ones
            return self._pending.with_parts(number for number in numbers if number in self._pending.parts)
        return Checkpoint(() if self._model is None else self._model.wholes, epoch=self._epoch).with_parts(numbers)

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> tuple[str, ...]:
        """Go on from ``state_dict()`` of the same rank, or from a gathered or distributed one of any number of ranks.

        All ranks together. On other numbers of ranks than saved it, the effect of what is owed on the average is kept.

        Args:
            strict: refuse the checkpoint of a model with other parameters; else keep what fits by name and shape.

        Returns:
            What was dropped, in words, which are logged too. Nothing yet, if the state has not started.

        Raises:
            CheckpointError: another rank's state, another model, or a malformed one; nothing is changed then.
        """
        if self._session is not None and not self.is_off:
            return resume.load(self._session, state, strict=strict)
        self._pending, self._strict, self._has_later_epoch = Checkpoint.parse(state), strict, False
        return ()

    def gather_state_dict(self) -> dict[str, Any]:
        """All ranks' residuals in one dictionary, the same on every rank. All ranks together.

        After :meth:`unregister` nothing is owed any more.
        """
        if self.is_off:
            return self._saved(range(NUM_PARTS)).to_dict()
        if self._session is None:
            raise CheckpointError("nothing to gather before the first step; call state.start() or train a step")
        return resume.gathered(self._session).to_dict()

    def __getstate__(self) -> dict[str, Any]:
        """Groups, threads and the model stay behind; settings, strategy and residuals travel."""
        gone = self._session is not None and self._closed and self._session.store.remote is not None  # with its servers
        saved = None if gone or (self._session is None and self._pending is None) else self.state_dict()
        return self._settings() | {"state": saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given: Given = state["given"]
        strategy = AUTO if given.strategy is None else given.strategy
        self.__init__(given.compressors, strategy)  # type: ignore[misc]
        self._given = replace(self._given, source=given.source)
        self.config = state["config"]
        if state["state"] is not None:
            self.load_state_dict(state["state"])

    def __deepcopy__(self, memo: Any) -> Self:
        """As it was before it started: a copy of a model, for an average of weights say, owes nothing of gradients."""
        copied = self.__new__(type(self))
        copied.__setstate__(self._settings() | {"state": None})
        copied._epoch, copied._has_later_epoch = self._epoch, self._has_later_epoch
        copied._pending, copied._strict = self._pending, self._strict
        _LIVE.discard(copied)  # until it is given a model
        return copied

    def _settings(self) -> dict[str, Any]:
        given, is_local = self._given, "<" in getattr(self._given.strategy, "__qualname__", "")
        if is_local and self._session is not None:  # a function that has no name to find it by: what it made
            given = self._session.given
        return {"given": given, "config": self.config}

    # -- the end -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop threads and free the process groups. Safe at any time, and more than once."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._front is not None:
            self._front.detach()
        if self._session is not None:
            self._abandon.detach()
            self._session.close()


def _nothing_follows() -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(torch.empty(0, device="cpu"))
    return future


def _times(factor: float, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    """An average over all ranks as one over some; the bucket's own numbers stay, which may still be looked at."""
    return future.value() * factor


@atexit.register
def _close_all() -> None:
    for state in list(_LIVE):
        try:
            if state._model is None and not state.is_off and told_world_size() > 1:
                logger.warning(
                    "%r was never given a model, so gradients were averaged without it: call espresso.register."
                    " (Lightning ignores ddp_comm_hook on the CPU; espresso.integrations.lightning does not)",
                    state,
                )
            state.close()
        except Exception:  # the other models' ranks are to hear that they end as well
            logger.exception("closing %r", state)
