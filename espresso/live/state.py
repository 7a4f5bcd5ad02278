"""DDP's state of a job, and ``register``: settings before the start, a session from then on.

    state = espresso.register(ddp_model, compressor="dgc:ratio=0.01", strategy="auto")

One state serves one model. It is the ``state`` that DDP passes to ``espresso_hook``.
"""

from __future__ import annotations

import atexit
import io
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from espresso.comm.errors import EspressoError, UnsupportedModelError
from espresso.comm.hook import DdpBuckets, espresso_hook
from espresso.comm.witness import lost_peer
from espresso.diagnosis.report import Diagnosis
from espresso.live.checkpoint import Checkpoint, CheckpointError, Kept
from espresso.live.config import Config, Settings
from espresso.live.given import AUTO, Given, StrategyLike
from espresso.live.names import BoundModel
from espresso.live.observe import diagnosed
from espresso.live.recorder import KEPT_STEPS
from espresso.live.script import LossScale, Scaler
from espresso.live.session import METRICS, Session
from espresso.live.summary import summary_of
from espresso.model.job import Job
from espresso.strategies import Cluster, CompressorSpec, Strategy

_LIVE: weakref.WeakSet[EspressoState] = weakref.WeakSet()


class EspressoState:
    """What the hook is given: settings, the model's names, and the session once it has started.

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
        strategy: StrategyLike = AUTO,
        process_group: dist.ProcessGroup | None = None,
        grad_scaler: Scaler | None = None,
        **config: Unpack[Settings],
    ) -> None:
        self.config = Config.from_keywords(dict(config))
        self._given = Given.of(compressor, strategy)
        self._process_group = process_group
        if not (grad_scaler is None or hasattr(grad_scaler, "get_scale")):
            raise TypeError(f"grad_scaler must have a get_scale(), as torch.amp.GradScaler, got {grad_scaler!r:.80}")
        self._scale = LossScale(grad_scaler)
        self._epoch: int | None = None
        self._pending: Checkpoint | None = None
        self._model: BoundModel | None = None
        self._buckets = DdpBuckets({})
        self._session: Session | None = None
        self._closed = False
        self._pid = os.getpid()
        self.before_exchange: list[Callable[[GradBucket, float], None]] = []
        _LIVE.add(self)

    @property
    def compressor(self) -> CompressorSpec:
        """The one that automatic mode may use."""
        return self._given.compressor

    # -- the start -----------------------------------------------------------------------------------

    def bind(self, module: torch.nn.Module) -> EspressoState:
        """Learn the parameters' names from the model (wrapped in DDP or not).

        Raises:
            UnsupportedModelError: a parameter that cannot be exchanged, by name.
            StrategyError: the given strategy was made for another model.
        """
        model = BoundModel.of(module)
        strategy = self._given.strategy
        if isinstance(strategy, Strategy) and self._session is None:
            strategy.check_model(model.tensors, strategy.cluster)
        self._model, self._buckets = model, DdpBuckets(model.names)
        return self

    def start(self) -> EspressoState:
        """Make process groups and compare the ranks' settings. All ranks together; the hook does it if you do not.

        Raises:
            DisagreementError: ranks differ in model, compressor, strategy or settings.
            StrategyError: the strategy was made for another model or cluster.
        """
        if self._session is not None:
            return self
        if self._model is None:
            raise EspressoError(
                "espresso does not know this model's parameter names: use espresso.register(ddp_model, …),"
                " or call state.bind(model) before the first backward pass"
            )
        session = Session(self.config, self._given, self._model, self._process_group, self._scale, self._epoch)
        if self._pending is not None:
            try:
                session.load(self._pending)
            except BaseException:
                session.close()
                raise
        self._session, self._pending = session, None
        # A state that is dropped without close() must not leave its threads behind.
        weakref.finalize(self, session.abandon).atexit = False
        return self

    @property
    def session(self) -> Session:
        """The job that was started.

        Raises:
            EspressoError: not yet.
        """
        if self._session is None:
            raise EspressoError("the exchange has not started; call state.start() first, or train a step")
        return self._session

    # -- the hook ------------------------------------------------------------------------------------

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What ``espresso_hook`` does."""
        if not isinstance(bucket, GradBucket):
            raise UnsupportedModelError(
                f"the hook was given a {type(bucket).__name__} instead of a DDP bucket: torch.compile's own"
                " gradient hooks are not supported; compile the module inside DDP instead of the DDP wrapper"
            )
        if self._closed or os.getpid() != self._pid:
            raise EspressoError("this espresso state is closed (or was inherited by a forked process)")
        session = self._session or self.start().session
        index = bucket.index()
        if index == 0:
            self._scale.begin()
        if self.before_exchange:
            scale = self._scale()
            for prepare in self.before_exchange:
                prepare(bucket, 1.0 if scale is None else scale)
        return session.exchange(
            index, bucket.buffer(), is_last=bucket.is_last(), describe=lambda: self._buckets.describe(bucket)
        )

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
            self._session.set_epoch(epoch)
        self._epoch = epoch

    def use(self, strategy: Strategy) -> None:
        """Carry out ``strategy`` from the next iteration on. All ranks, between the same two iterations.

        Residuals move over; what has no place in the new strategy is sent with the next gradients.

        Raises:
            StrategyError: it was made for another model or cluster.
            ValueError: an unknown compressor, or another momentum than the job has.
            EspressoError: the state has not started.
        """
        self.session.use(strategy)

    # -- failure -------------------------------------------------------------------------------------

    @property
    def error(self) -> EspressoError | None:
        """The first error of the exchange, if there was one."""
        return None if self._session is None else self._session.executor.error

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Have a failed exchange raise its own error. DDP words it as "RuntimeError: Unable to cast …".

        Put it around forward, backward and step. Without it ``backward()`` raises DDP's wording, and the
        next ``optimizer.step()`` the original: gradients that were not averaged are never applied. A connection
        that is lost in a collective of DDP's or yours becomes an error that says whose it was.

        Example:
            >>> with state.errors():                # doctest: +SKIP
            ...     loss(ddp_model(batch)).backward()
            ...     optimizer.step()
        """
        try:
            yield
        except EspressoError:
            raise
        except RuntimeError as error:
            if self.error is not None:
                raise self.error from self.error.__cause__
            if self._session is None or not lost_peer(str(error)):
                raise
            raise self._session.groups.witness.explain("a collective outside espresso", error) from error

    # -- what users look at --------------------------------------------------------------------------

    @property
    def decided(self) -> bool:
        """Whether the strategy is settled (at once for a given one)."""
        return self._session is not None and self._session.decider.decided

    @property
    def strategy(self) -> Strategy | None:
        """The strategy in use; None before the first step."""
        return None if self._session is None else self._session.decider.strategy

    def summary(self) -> str:
        """A few lines for people: what was decided, why, what it gains, sends and keeps. No communication.

        Example:
            >>> print(state.summary())   # doctest: +SKIP
            job       2 nodes x 1 ranks; 4 tensors, 12.6 MB of gradients; step 61
            decided   everything once: measured in alternated blocks: plain 212.0 ms, everything once 31.5 ms a step
            strategy  2 of 4 tensors are compressed, 99.9% of the elements
                      2 by efsignsgd:block=64: comp > flat.allgather > dec
            gains     31.5 ms a step instead of 212.0, 6.73 times as fast, predicted 30.2
            sends     492 kB a step and rank, plain 12.6 MB, 25.6 times less
            keeps     25.2 MB of residuals
        """
        if self._session is None:
            return "not started: the exchange starts with state.start(), or with the first backward pass"
        return summary_of(self._session)

    def __repr__(self) -> str:
        given = self._given.strategy
        asked = AUTO if given is None else repr(given) if isinstance(given, Strategy) else "a function"
        if self._closed:
            now = "closed"
        elif self._session is None:
            now = "not started"
        else:
            now = self.verdict or "measuring"
        return f"<EspressoState: {self.compressor}, strategy {asked}; {now}>"

    @property
    def verdict(self) -> str:
        """What automatic mode decided and why, in one sentence; empty before that."""
        verdict = None if self._session is None else self._session.decider.verdict
        return "" if verdict is None else f"{verdict.name}: {verdict.reason}"

    @property
    def advice(self) -> str:
        """What to set for a shorter iteration, DDP's bucket size for one (rank 0, automatic mode); else empty."""
        search = None if self._session is None else self._session.search
        return "" if search is None else search.advice

    @property
    def job(self) -> Job | None:
        """The measured :class:`~espresso.model.job.Job` (after profiling), else None."""
        search = None if self._session is None else self._session.search
        return None if search is None else search.job

    @property
    def cluster(self) -> Cluster | None:
        """The cluster this job runs on; None before ``start``."""
        return None if self._session is None else self._session.groups.cluster

    @property
    def rank(self) -> int:
        """This rank's place in the job.

        Raises:
            EspressoError: the state has not started.
        """
        return self.session.groups.rank

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The name of a bound model's parameter; None for any other tensor."""
        return None if self._model is None else self._model.names.get(id(parameter))

    def rescale_residuals(self, factors: Mapping[str, float]) -> None:
        """Multiply what is kept of the named tensors at every site. All ranks alike, between iterations.

        Residuals at parameter servers are reached through the first rank, which waits for their answer.
        """
        if self._session is not None:
            self._session.store.rescale(factors)

    def metrics(self) -> dict[str, float]:
        """Flat figures for any logger: bytes of the latest step, residual norm, predicted and measured step time."""
        return dict.fromkeys(METRICS, 0.0) if self._session is None else self._session.metrics()

    def record(self, path: str | os.PathLike[str], last: int = KEPT_STEPS) -> Path:
        """Write what happened in this rank's last steps, for ``espresso diagnose``. No communication.

        Args:
            path: a file that ends in ``.json``, or a folder, in which every rank writes a file of its own.
            last: so many steps, as far as they are kept.

        Returns:
            The file.

        Raises:
            EspressoError: the state has not started.
            OSError: it cannot be written.
        """
        return self.session.recorder.write(path, last)

    def diagnose(self) -> Diagnosis:
        """What is slow in the last steps, and what would help: ``espresso diagnose`` inside a run. All ranks together.

        Raises:
            FlightError: too few steps so far.
            EspressoError: the state has not started.
        """
        return diagnosed(self.session.groups, self.session.recorder)

    def check_replicas(self) -> None:
        """Compare all parameters between ranks, bit for bit. All ranks together.

        Raises:
            DisagreementError: names the rank and the first tensor that differs from rank 0.
        """
        if self._session is not None:
            self._session.check_replicas()

    # -- checkpoints ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals, counters and strategy. Per rank: save one file for each.

        For one file that any number of ranks can load, see :meth:`gather_state_dict`.
        """
        if self._session is not None:
            return self._session.kept().to_dict()
        if self._pending is not None:
            return self._pending.to_dict()
        return Kept(0, 0, "" if self._model is None else self._model.digest, epoch=self._epoch).to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict()`` of the same rank, or from ``gather_state_dict()`` of any number of ranks.

        Raises:
            CheckpointError: another rank's state, another model, or a malformed one; nothing is changed then.
        """
        checkpoint = Checkpoint.parse(state)
        if self._session is None:
            self._pending = checkpoint
        else:
            self._session.load(checkpoint)

    def gather_state_dict(self) -> dict[str, Any]:
        """All ranks' residuals in one dictionary, the same on every rank. All ranks together."""
        if self._session is None:
            raise CheckpointError("nothing to gather before the first step; call state.start() or train a step")
        return self._session.gathered().to_dict()

    def __getstate__(self) -> dict[str, Any]:
        """Groups, threads and the model stay behind; settings, strategy and residuals travel."""
        saved = None if self._session is None and self._pending is None else self.state_dict()
        return {"given": self._given, "config": self.config, "state": saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        given: Given = state["given"]
        strategy = AUTO if given.strategy is None else given.strategy
        self.__init__(given.compressor, strategy)  # type: ignore[misc]
        self.config = state["config"]
        if state["state"] is not None:
            self.load_state_dict(state["state"])

    # -- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop threads and free the process groups. Safe at any time, and more than once."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._session is not None:
            self._session.close()


def register(
    ddp_model: DistributedDataParallel,
    compressor: str | CompressorSpec = "efsignsgd",
    strategy: StrategyLike = AUTO,
    process_group: dist.ProcessGroup | None = None,
    grad_scaler: Scaler | None = None,
    **config: Unpack[Settings],
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
    hooks = getattr(ddp_model, "_comm_hooks", ())
    if hooks:
        raise UnsupportedModelError(
            f"this model has a communication hook already ({hooks[0][0].__name__}), and DDP takes one for its life:"
            " register once, or wrap the model in DistributedDataParallel anew"
        )
    group = ddp_model.process_group if process_group is None else process_group
    state = EspressoState(compressor, strategy, group, grad_scaler, **config)
    state.bind(ddp_model).start()
    try:
        ddp_model.register_comm_hook(state, espresso_hook)
    except BaseException:
        state.close()
        raise
    return state


class PerRank:
    """A state as ``torch.distributed.checkpoint`` wants it: one opaque entry per rank.

    Example:
        >>> dcp.save({"espresso": PerRank(state)}, checkpoint_id=path)   # doctest: +SKIP
    """

    def __init__(self, state: EspressoState) -> None:
        self._state = state

    def _key(self) -> str:
        self._state.start()
        return f"rank_{self._state.rank}"

    def state_dict(self) -> dict[str, Any]:
        key, buffer = self._key(), io.BytesIO()
        torch.save(self._state.state_dict(), buffer)
        return {key: buffer}

    def load_state_dict(self, body: dict[str, Any]) -> None:
        key = self._key()
        if key not in body:
            raise CheckpointError(f"the checkpoint has no entry {key!r}; it was saved by fewer ranks")
        body[key].seek(0)
        try:
            found = torch.load(body[key], weights_only=True)
        except Exception as error:  # of damaged bytes whatever reading them runs into
            raise CheckpointError(f"the entry {key!r} cannot be read; it is damaged ({error})") from error
        self._state.load_state_dict(found)


@atexit.register
def _close_all() -> None:
    for state in list(_LIVE):
        state.close()
