"""A job: everything that was measured of a training run, and so everything a search needs.

``job.json`` lets a search be repeated offline; it names its schema version and rejects unknown keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from espresso.model.costs import CostModel
from espresso.model.links import JobError
from espresso.strategies import (
    DTYPES,
    Bucket,
    Cluster,
    Mode,
    Slot,
    Strategy,
    TensorSpec,
    fingerprint,
    paper_buckets,
)
from espresso.strategies import fields as forms
from espresso.strategies.fields import faults, first_twice, number, scale, shown, whole

KIND = "espresso-job"


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of an uneven cluster: its times as shares of the slowest machine's, which are the job's.

    Attributes:
        count: machines that are like it.
        compute: of forward and backward.
        compression: of compressors and the optimizer.
        link: of a byte on its network card.
    """

    name: str
    count: int = 1
    compute: float = 1.0
    compression: float = 1.0
    link: float = 1.0

    def __post_init__(self) -> None:
        with faults(JobError):
            whole(self.count, f"host {self.name!r}: count", least=1)
            for what in SHARES:
                if number(getattr(self, what), f"host {self.name!r}: {what}", positive=True) > 1:
                    raise JobError(f"host {self.name!r}: {what} is a share of the slowest machine's time, at most 1")


SENSITIVITY, GAIN_SCALE, TERMS, OFFERED = "sensitivity", "gain_scale", "automatic", "compressor"
"""Of a job's meta: what compressors owe of its gradients, as it was measured; by how much their feedback gains are
multiplied beside its optimizer, 1 where it is not there; what its search keeps to, as
:class:`espresso.search.terms.Terms` writes it; the compressors that any tensor may take, separated by semicolons."""

SHARES = ("compute", "compression", "link")

STEADY = 0.05
"""The spread of a profile that is steady is at most this: that of the paper's is below 5 % (EuroSys '23, 100 steps)."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a job's gaps are medians of.

    Attributes:
        num_steps: that were measured.
        spread: the standard deviation of backward's time over its mean, by quartiles; the largest of all ranks.
    """

    num_steps: int
    spread: float

    def __post_init__(self) -> None:
        with faults(JobError):
            whole(self.num_steps, "num_steps", least=1)
            number(self.spread, "spread")

    def __str__(self) -> str:
        above = "" if self.spread <= STEADY else f", above the {100 * STEADY:g} % of a steady one"
        return f"{self.num_steps} steps, backward's spread is {100 * self.spread:.1f} %{above}"


@dataclass(frozen=True)
class Job:
    """A training iteration as measured, on one cluster, with its costs.

    Attributes:
        model: what people call it.
        tensors: in the order in which backward makes their gradients ready.
        gaps_us: for every tensor, time since the previous gradient became ready; the first is 0.
        cluster: its shape.
        costs: links, compressors, contention.
        mode: whether tensors go alone (``PAPER``) or with DDP's buckets.
        buckets: DDP's buckets in the order in which they are handed over; None in paper mode.
        bucket_ready_us: for every bucket, when it is handed over, counted from the first ready gradient.
        forward_us: start of the iteration to the first ready gradient.
        optimizer_us: everything after the last averaged gradient until the next iteration starts.
        source: where the figures come from.
        meta: hardware, versions, date.
        hosts: of an uneven cluster; empty where machines are alike. All other figures are the slowest machine's, so
            that timeline and certificate hold for it: ranks wait for one another.
        profile: of how many steps, and how far they were apart; None where nobody knows.

    Raises:
        JobError: lists of different lengths, a tensor named twice or missing, a number that is no time.
    """

    model: str
    tensors: tuple[TensorSpec, ...]
    gaps_us: tuple[float, ...]
    cluster: Cluster
    costs: CostModel
    mode: Mode = Mode.PAPER
    buckets: tuple[Bucket, ...] | None = None
    bucket_ready_us: tuple[float, ...] | None = None
    forward_us: float = 0.0
    optimizer_us: float = 0.0
    source: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict, compare=False)
    hosts: tuple[Host, ...] = ()
    profile: Profile | None = None

    def __post_init__(self) -> None:
        if not self.tensors:
            raise JobError("a job needs at least one tensor")
        if len(self.gaps_us) != len(self.tensors):
            raise JobError(f"{len(self.tensors)} tensors but {len(self.gaps_us)} gaps")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise JobError(f"tensor {shown(first_twice(names))} appears twice")
        with faults(JobError):
            for tensor, gap in zip(self.tensors, self.gaps_us, strict=True):
                number(gap, f"tensor {tensor.name!r}: gap_us")
            number(self.forward_us, "forward_us")
            number(self.optimizer_us, "optimizer_us")
            scale(self.gain_scale, f"meta.{GAIN_SCALE}")
        if (self.buckets is None) != (self.bucket_ready_us is None):
            raise JobError("buckets and bucket_ready_us go together: give both or neither")
        if (self.buckets is None) != (self.mode is Mode.PAPER):
            raise JobError(f"mode is {self.mode.value!r}: buckets belong to 'ddp' jobs, and only to them")
        with faults(JobError):
            self._check_buckets()
        self._check_hosts()

    def _check_hosts(self) -> None:
        if not self.hosts:
            return
        names = [host.name for host in self.hosts]
        if len(set(names)) != len(names):
            raise JobError(f"host {shown(first_twice(names))} appears twice")
        count = sum(host.count for host in self.hosts)
        if count != self.cluster.num_nodes:
            raise JobError(f"hosts are {count} machines, but the cluster has {self.cluster.num_nodes}")
        for what in SHARES:
            if max(getattr(host, what) for host in self.hosts) != 1:
                raise JobError(f"no host has {what} 1: the job's own times are those of the slowest machine")

    def _check_buckets(self) -> None:
        if self.buckets is None or self.bucket_ready_us is None:
            return
        if len(self.buckets) != len(self.bucket_ready_us):
            raise JobError(f"{len(self.buckets)} buckets but {len(self.bucket_ready_us)} ready times")
        by_name = {tensor.name: tensor for tensor in self.tensors}
        seen: set[str] = set()
        last = 0.0
        for position, (bucket, ready) in enumerate(zip(self.buckets, self.bucket_ready_us, strict=True)):
            if bucket.index != position:
                raise JobError(f"bucket {position} has index {bucket.index}; number them in ready order")
            if number(ready, f"bucket {position}: ready_us") < last:
                raise JobError(f"bucket {position} is ready at {ready:g}, before the one ahead of it ({last:g})")
            last = ready
            if bucket.dtype not in DTYPES:
                raise JobError(f"bucket {position}: dtype {shown(bucket.dtype)} is not one of {', '.join(DTYPES)}")
            for slot in bucket.slots:
                tensor = by_name.get(slot.tensor)
                if tensor is None:
                    raise JobError(f"bucket {position} holds tensor {slot.tensor!r}, which the job does not list")
                if slot.tensor in seen:
                    raise JobError(f"tensor {slot.tensor!r} lies in two buckets")
                if slot.numel != tensor.numel:
                    raise JobError(
                        f"bucket {position}: tensor {slot.tensor!r} has {slot.numel} elements there"
                        f" and {tensor.numel} in the job"
                    )
                whole(slot.offset, f"bucket {position}: the offset of tensor {slot.tensor!r}")
                seen.add(slot.tensor)
        missing = [name for name in by_name if name not in seen]
        if missing:
            raise JobError(f"tensor {missing[0]!r} lies in no bucket")

    @cached_property
    def ready_us(self) -> tuple[float, ...]:
        """When each bucket (paper mode: each tensor) is ready, on backward's own clock."""
        if self.bucket_ready_us is not None:
            return self.bucket_ready_us
        return tuple(accumulate(self.gaps_us))

    @property
    def backward_us(self) -> float:
        """First ready gradient to the end of backward, undisturbed."""
        return max(self.ready_us[-1], sum(self.gaps_us))

    @property
    def gain_scale(self) -> float:
        """By how much compressors' own feedback gains are multiplied beside the job's optimizer."""
        found: float = self.meta.get(GAIN_SCALE, 1.0)
        return found

    @property
    def fingerprint(self) -> str:
        """Equal to that of every strategy made for this model and cluster shape."""
        return fingerprint(self.tensors, self.cluster)

    @property
    def host_copies(self) -> bool:
        """Whether offloaded steps, pushes and pulls copy between device and host."""
        return self.costs.copy is not None

    @cached_property
    def laid_out(self) -> tuple[Bucket, ...]:
        """The buckets that plans are laid over: DDP's, or one per tensor in paper mode."""
        if self.buckets is not None:
            return self.buckets
        return paper_buckets(Strategy.uniform(self.tensors, self.cluster), [t.name for t in self.tensors])

    def to_json(self) -> dict[str, Any]:
        buckets = None
        if self.buckets is not None and self.bucket_ready_us is not None:
            buckets = tuple(
                _Bucket(ready, tuple((slot.tensor, slot.offset, slot.numel) for slot in bucket.slots), bucket.dtype)
                for bucket, ready in zip(self.buckets, self.bucket_ready_us, strict=True)
            )
        body: dict[str, Any] = forms.as_json(
            _File(
                self.model,
                self.mode,
                self.cluster,
                self.forward_us,
                tuple(
                    _Tensor(t.name, t.shape, gap, t.dtype) for t, gap in zip(self.tensors, self.gaps_us, strict=True)
                ),
                self.costs,
                self.optimizer_us,
                buckets,
                self.source,
                self.meta,
                self.hosts or None,
                self.profile,
            )
        )
        return forms.head(KIND) | body

    @classmethod
    def from_json(cls, body: Any) -> Job:
        """Read what ``to_json`` wrote.

        Raises:
            JobError: an unknown or missing key, or a faulty value, by name.
        """
        with faults(JobError):
            found = forms.read_as(_File, forms.without_head(body, KIND), "the job")
            buckets = found.buckets
            return cls(
                model=found.model,
                tensors=tuple(TensorSpec(row.name, row.shape, row.dtype) for row in found.tensors),
                gaps_us=tuple(row.gap_us for row in found.tensors),
                cluster=found.cluster,
                costs=found.costs,
                mode=found.mode,
                buckets=None if buckets is None else tuple(row.bucket(at) for at, row in enumerate(buckets)),
                bucket_ready_us=None if buckets is None else tuple(row.ready_us for row in buckets),
                forward_us=found.forward_us,
                optimizer_us=found.optimizer_us,
                source=found.source,
                meta=found.meta or {},
                hosts=found.hosts or (),
                profile=found.profile,
            )

    def save(self, path: str | Path) -> None:
        """Write ``job.json``."""
        forms.save(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read ``job.json``.

        Raises:
            JobError: the file is not JSON or not a valid job; the message begins with the path.
            OSError: the file cannot be read.
        """
        return forms.load(path, cls.from_json, JobError)


@dataclass(frozen=True)
class _Tensor:
    """A tensor in a job file."""

    name: str
    shape: tuple[int, ...]
    gap_us: float
    dtype: str = "float32"


@dataclass(frozen=True)
class _Bucket:
    """A bucket in a job file; a slot is tensor, offset and elements."""

    ready_us: float
    slots: tuple[tuple[str, int, int], ...]
    dtype: str = "float32"

    def bucket(self, index: int) -> Bucket:
        return Bucket(index, tuple(Slot(*slot) for slot in self.slots), self.dtype)


@dataclass(frozen=True)
class _File:
    """A job file, below its head."""

    model: str
    mode: Mode
    cluster: Cluster
    forward_us: float
    tensors: tuple[_Tensor, ...]
    costs: CostModel
    optimizer_us: float = 0.0
    buckets: tuple[_Bucket, ...] | None = None
    source: str = ""
    meta: Mapping[str, Any] | None = None
    hosts: tuple[Host, ...] | None = None
    profile: Profile | None = None


__all__ = ["SHARES", "STEADY", "Host", "Job", "JobError", "Profile"]
