"""What users look at while a job runs: what was decided, what it sends and keeps, how it failed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from espresso.comm.errors import EspressoError
from espresso.comm.witness import is_of_a_collective
from espresso.diagnosis.report import Diagnosis
from espresso.live import resume
from espresso.live.figures import METRICS, metrics_of
from espresso.live.observe import diagnosed
from espresso.live.recorder import KEPT_STEPS
from espresso.live.session import Session
from espresso.live.summary import summary_of
from espresso.model.job import Job
from espresso.strategies import Cluster, Strategy


class View:
    """A state as its user sees it. It changes nothing; some methods are for all ranks together."""

    _session: Session | None
    _process_group: dist.ProcessGroup | None
    _off: str
    _has_left: bool = False

    @property
    def is_off(self) -> bool:
        """Whether gradients are averaged as by plain DDP."""
        return bool(self._off) or self._has_left

    @property
    def session(self) -> Session:
        """The job that was started.

        Raises:
            EspressoError: not yet, or the state is off.
        """
        if self._session is None and self._off:
            raise EspressoError(f"there is no exchange: espresso is off ({self._off})")
        if self._session is None:
            raise EspressoError("the exchange has not started; call state.start() first, or train a step")
        return self._session

    @property
    def decided(self) -> bool:
        """Whether the strategy is settled (at once for a given one)."""
        return self.is_off or (self._session is not None and self._session.decider.decided)

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
        if self._off:
            return f"off: {self._off}; gradients are averaged as by plain DDP"
        if self._session is None:
            return "not started: the exchange starts with state.start(), or with the first backward pass"
        return summary_of(self._session)

    @property
    def verdict(self) -> str:
        """What automatic mode decided and why, in one sentence; empty before that."""
        verdict = None if self._session is None else self._session.decider.verdict
        return "" if verdict is None else f"{verdict.name}: {verdict.reason}"

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was decided and when, one row for each event, the same on every rank but for its times; empty
        before the first.

        A row has ``step``, ``event`` (``decided``, ``changed``, ``kept``, ``switched``, ``backed_off``), ``reason``,
        ``strategy`` (the name of the one in use from then on), ``predicted_us`` and ``measured_us`` (of a step of it;
        0: unknown), ``at_us`` (since the start) and ``took_us``.
        """
        return [] if self._session is None else [dict(row) for row in self._session.history.rows]

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
        return resume.place(None, self._process_group).rank if self._off else self.session.groups.rank

    def metrics(self) -> dict[str, float]:
        """Flat figures for any logger: bytes of the latest step, residual norm, predicted and measured step time."""
        return dict.fromkeys(METRICS, 0.0) if self._session is None else metrics_of(self._session)

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
        self.session.executor.conclude()
        return diagnosed(self.session.groups, self.session.recorder)

    def check_replicas(self) -> None:
        """Compare all parameters between ranks, bit for bit. All ranks together. Nothing where the state is off.

        Raises:
            DisagreementError: names the rank and the first tensor that differs from rank 0.
        """
        if self._session is not None and not self.is_off:
            self._session.executor.conclude()
            self._session.check_replicas()

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
            if self._session is None or not is_of_a_collective(error):
                raise
            raise self._session.groups.witness.explain("a collective outside espresso", error) from error
