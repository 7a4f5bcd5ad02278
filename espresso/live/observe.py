"""``espresso.observe``: record and diagnose a DDP job that exchanges its gradients in another way.

DDP has one hook slot, and an observer leaves it alone. It sees forward, backward and optimizer, when each bucket was
ready, when all averages were there, clocks and connections; not when each exchange ended.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from espresso.comm.errors import EspressoError
from espresso.comm.execute.assignment import Assignment, Record
from espresso.comm.groups import Groups
from espresso.diagnosis.findings import diagnose
from espresso.diagnosis.report import Diagnosis
from espresso.flight.form import Flight
from espresso.live.artifacts import own_folder
from espresso.live.config import RANGES, overridden
from espresso.live.marks import PATIENCE, ScriptMarks, facts_of
from espresso.live.names import named_gradients, tensor_specs
from espresso.live.recorder import KEPT_STEPS, Recorder
from espresso.strategies import Bucket, Strategy, ring_bytes

logger = logging.getLogger("espresso")

_LIVE: weakref.WeakSet[ObservedJob] = weakref.WeakSet()

BUCKETS_KNOWN, SIZES_KNOWN = "rebuilt_per_bucket_param_indices", "bucket_sizes"
"""Where DDP's log says which parameters its buckets hold, once it has rebuilt them, and how many bytes before."""


class ObservedJob:
    """A job that is watched. Made by all ranks together; see :func:`observe`."""

    def __init__(
        self,
        model: DistributedDataParallel,
        artifacts_dir: str | os.PathLike[str] | None = None,
        *,
        ranks_per_node: int | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        given = {"artifacts_dir": artifacts_dir, "ranks_per_node": ranks_per_node, "timeout_s": timeout_s}
        settings = overridden(given)
        for name, value in settings.items():
            RANGES[name].check(name, value)
        parameters = named_gradients(model)
        self._model: Callable[[], DistributedDataParallel | None] = weakref.ref(model)
        self._pid = os.getpid()
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        on_device = any(parameter.device.type != "cpu" for parameter in parameters.values())
        self._buckets: tuple[Bucket, ...] = ()
        self._ready_ns: list[int] = []
        self._count = 0
        self._handles: list[Any] = []
        with ExitStack() as undo:
            self._groups = Groups(
                model.process_group,
                ranks_per_node=settings["ranks_per_node"],
                timeout_s=settings["timeout_s"],
                host_copies=on_device,
            )
            undo.callback(self._groups.close, wait=False)
            self.recorder = Recorder(self._groups)
            self.recorder.facts |= facts_of(model) | {"observed": True}
            plain = Strategy.uniform(tensor_specs(parameters), self._groups.cluster, partition_bytes=0)
            self._assignment = Assignment(plain)
            self._artifacts_dir = own_folder(settings["artifacts_dir"], model, self._groups)
            undo.callback(self._forget)
            self._watch([list(parameters.values())])
            marks = ScriptMarks(model, self._names, self.recorder, self._averaged)
            undo.callback(marks.detach)
            self.recorder.look()
            self.recorder.look_at_card()
            undo.pop_all()
        self._marks: ScriptMarks | None = marks
        _LIVE.add(self)
        # Until the model goes the optimizers' hooks hold this, whoever else does.
        end = partial(self.recorder.leave, self._artifacts_dir, "the job ended")
        self._ends = (
            weakref.finalize(model, self._detach),
            weakref.finalize(self, _abandon, self._pid, end, self._groups),
        )
        for each in self._ends:
            each.atexit = False

    def record(self, path: str | os.PathLike[str], last: int = KEPT_STEPS) -> Path:
        """As :meth:`EspressoState.record <espresso.EspressoState.record>`."""
        return self.recorder.write(path, last)

    def diagnose(self) -> Diagnosis:
        """What is slow, and what would help. All ranks together, between two steps.

        Raises:
            FlightError: too few steps so far.
        """
        return diagnosed(self._groups, self.recorder)

    def close(self) -> None:
        """Stop watching, and leave the record in ``artifacts_dir``. It runs by itself at exit."""
        if self._marks is None or os.getpid() != self._pid:
            return
        for each in self._ends:
            each.detach()
        self._detach()
        self._marks = None
        self.recorder.leave(self._artifacts_dir, "the job ended")
        self._groups.close()

    def _detach(self) -> None:
        if self._marks is not None:
            self._marks.detach()
        self._forget()

    def _averaged(self) -> None:
        """DDP has its averages, or was told to exchange nothing."""
        model = self._model()
        if model is None or not model.require_backward_grad_sync:
            self._ready_ns = [0] * len(self._ready_ns)
            return
        if not any(self._ready_ns):  # a gradient of one output, or of the inputs: no backward pass
            return
        self._count += 1
        self.recorder.begin()
        now, ready, buckets = time.perf_counter_ns(), self._ready_ns, self._buckets
        if _leaves_some_out(model):  # DDP has what was not used ready from the beginning
            ready = [at or min(filter(None, ready)) for at in ready]
        if buckets and all(ready):
            sent = sum(ring_bytes(bucket.numel, bucket.dtype, self._groups.num_ranks) for bucket in buckets)
            record = Record(self._count, self._assignment, list(ready), now, True, sent, sent, buckets)
            self.recorder.take(record)
        self._ready_ns = [0] * len(ready)
        if not buckets:
            self._find_buckets(model)
            if self._count == PATIENCE and not self._buckets:
                logger.warning("espresso.observe does not know DDP's buckets after %d steps, and keeps none", PATIENCE)

    def _find_buckets(self, model: DistributedDataParallel) -> None:
        """Watch each bucket from the next pass on, if it is known what they hold; until then all parameters are one."""
        data: Any = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        there = {id(parameter): parameter for parameter in model.parameters()}
        ours = [there[key] for key in self._names if key in there]  # as DDP numbers them
        held = _first_buckets(data, ours) if _keeps_first_buckets(model) else _rebuilt_buckets(data, ours)
        buckets = []
        for index, parameters in enumerate(held):
            numels = [(self._names[id(parameter)], parameter.numel()) for parameter in parameters]
            buckets.append(Bucket.packed(index, numels, str(parameters[-1].dtype).removeprefix("torch.")))
        if buckets:
            self._buckets = tuple(buckets)
            # Rebuilt ones hold parameters in the order in which gradients come, and those without one last.
            self._watch(held if _leaves_some_out(model) else [parameters[-1:] for parameters in held])

    def _watch(self, held: _Held) -> None:
        """Note when the last gradient of each of these is there."""
        self._forget()
        for index, parameters in enumerate(held):
            for parameter in filter(lambda each: each.requires_grad, parameters):
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(self._stamp(index)))
        self._ready_ns = [0] * len(held)

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _stamp(self, bucket: int) -> Callable[[torch.Tensor], None]:
        def stamp(_: torch.Tensor) -> None:
            self._ready_ns[bucket] = time.perf_counter_ns()

        return stamp


def _keeps_first_buckets(model: DistributedDataParallel) -> bool:
    """Whether DDP never lays its buckets by use."""
    return bool(model.find_unused_parameters) and not model.static_graph


def _leaves_some_out(model: DistributedDataParallel) -> bool:
    """Whether parameters may be without a gradient."""
    return bool(model.find_unused_parameters or model.static_graph)


_Held = list[list[torch.nn.Parameter]]
"""The parameters of every bucket; empty if that is not known."""


def _rebuilt_buckets(data: Mapping[str, Any], parameters: Sequence[torch.nn.Parameter]) -> _Held:
    rows = [row.split() for row in str(data.get(BUCKETS_KNOWN, "")).split(",") if row.strip()]
    if not all(i.isdigit() and int(i) < len(parameters) for row in rows for i in row):
        return []
    return [[parameters[int(i)] for i in row] for row in rows]


def _first_buckets(data: Mapping[str, Any], parameters: Sequence[torch.nn.Parameter]) -> _Held:
    """By their sizes: DDP's first buckets hold the last parameters."""
    sizes = [int(size) for size in str(data.get(SIZES_KNOWN, "")).split(",") if size.strip().isdigit()]
    left, held = list(parameters), _Held()
    for size in sizes:
        bucket: list[torch.nn.Parameter] = []
        while left and size > 0:
            bucket.append(left.pop())
            size -= bucket[-1].numel() * bucket[-1].element_size()
        if size or not bucket:
            return []  # of several types, say, which have buckets of their own
        held.append(bucket[::-1])
    return [] if left else held


def observe(
    ddp_model: DistributedDataParallel,
    artifacts_dir: str | os.PathLike[str] | None = None,
    *,
    ranks_per_node: int | None = None,
    timeout_s: float = 300.0,
) -> ObservedJob:
    """Record a DDP job without changing what it exchanges: with DDP's own all-reduce, or with any hook. All ranks.

    Args:
        ddp_model: as it trains.
        artifacts_dir: where every rank leaves its flight record at the end; None leaves none.
        ranks_per_node, timeout_s: as for :class:`~espresso.Config`.

    Returns:
        The observation: ``record(path)``, ``diagnose()``, ``close()``.

    Raises:
        TypeError, ValueError: not a DDP model, or a setting that is not what it should be.
        TopologyError: see there.

    Example:
        >>> watch = espresso.observe(ddp_model, "run")        # doctest: +SKIP
        >>> ...                                                # train some dozen steps
        >>> print(watch.diagnose())                            # doctest: +SKIP
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(f"espresso.observe needs a DistributedDataParallel model, got {type(ddp_model).__name__}")
    return ObservedJob(ddp_model, artifacts_dir, ranks_per_node=ranks_per_node, timeout_s=timeout_s)


def diagnosed(groups: Groups, recorder: Recorder) -> Diagnosis:
    """A diagnosis of the steps that all ranks have in their rings. Collective."""
    recorder.look()
    texts = groups.all_objects(json.dumps(recorder.flight().to_json()))
    if not all(isinstance(text, str) for text in texts):
        raise EspressoError("a rank sent no flight record")
    return diagnose([Flight.from_json(json.loads(text)) for text in texts])


def _abandon(pid: int, end: Callable[[], None], groups: Groups) -> None:
    """End what nobody looks at any more; any thread may find that, so none is waited for."""
    if os.getpid() == pid:
        threading.Thread(target=end, name="espresso-end").start()  # the process waits for what it writes
        threading.Thread(target=groups.let_go, name="espresso-end", daemon=True).start()


@atexit.register
def _close_all() -> None:
    for each in list(_LIVE):
        each.close()
