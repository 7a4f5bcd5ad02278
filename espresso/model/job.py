"""A job: everything that was measured of a training run, and so everything a search needs.

``job.json`` lets a search be repeated offline; it names its schema version and rejects unknown keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from espresso.model.costs import CostModel
from espresso.model.fields import JobError, check_keys, check_kind, items, member, number, text, whole
from espresso.strategies import (
    Bucket,
    Cluster,
    Mode,
    Slot,
    Strategy,
    TensorSpec,
    fingerprint,
    paper_buckets,
)

SCHEMA_VERSION = 1

_REQUIRED = ("schema_version", "kind", "model", "mode", "cluster", "tensors", "forward_us", "costs")
_OPTIONAL = ("optimizer_us", "buckets", "source", "meta")


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

    def __post_init__(self) -> None:
        if not self.tensors:
            raise JobError("a job needs at least one tensor")
        if len(self.gaps_us) != len(self.tensors):
            raise JobError(f"{len(self.tensors)} tensors but {len(self.gaps_us)} gaps")
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise JobError(f"tensor {twice!r} appears twice")
        for tensor, gap in zip(self.tensors, self.gaps_us, strict=True):
            number(gap, f"tensor {tensor.name!r}: gap_us")
        number(self.forward_us, "forward_us")
        number(self.optimizer_us, "optimizer_us")
        if (self.buckets is None) != (self.bucket_ready_us is None):
            raise JobError("buckets and bucket_ready_us go together: give both or neither")
        if (self.buckets is None) != (self.mode is Mode.PAPER):
            raise JobError(f"mode is {self.mode.value!r}: buckets belong to 'ddp' jobs, and only to them")
        self._check_buckets()

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

    def with_costs(self, costs: CostModel) -> Job:
        """The same job where links or compressors cost something else."""
        return replace(self, costs=costs)

    def to_json(self) -> dict[str, Any]:
        buckets = None
        if self.buckets is not None and self.bucket_ready_us is not None:
            buckets = [
                {
                    "ready_us": ready,
                    "dtype": bucket.dtype,
                    "slots": [[slot.tensor, slot.offset, slot.numel] for slot in bucket.slots],
                }
                for bucket, ready in zip(self.buckets, self.bucket_ready_us, strict=True)
            ]
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": "espresso-job",
            "model": self.model,
            "mode": self.mode.value,
            "cluster": self.cluster.to_json(),
            "forward_us": self.forward_us,
            "optimizer_us": self.optimizer_us,
            "tensors": [
                {"name": t.name, "shape": list(t.shape), "dtype": t.dtype, "gap_us": gap}
                for t, gap in zip(self.tensors, self.gaps_us, strict=True)
            ],
            "buckets": buckets,
            "costs": self.costs.to_json(),
            "source": self.source,
            "meta": dict(self.meta),
        }

    @classmethod
    def from_json(cls, body: Any) -> Job:
        """Read what ``to_json`` wrote.

        Raises:
            JobError: an unknown or missing key, or a faulty value, by name.
        """
        check_kind(body, "espresso-job")
        check_keys(body, "the job", _REQUIRED, _OPTIONAL)
        if body["schema_version"] != SCHEMA_VERSION:
            raise JobError(
                f"schema_version {body['schema_version']!r} is not supported; this version reads {SCHEMA_VERSION}"
            )
        if body["kind"] != "espresso-job":
            raise JobError(f"kind is {body['kind']!r}, expected 'espresso-job'")
        tensors, gaps = _read_tensors(body["tensors"])
        buckets, ready = _read_buckets(body.get("buckets"))
        meta = body.get("meta") or {}
        if not isinstance(meta, dict):
            raise JobError(f"meta must be an object, got {type(meta).__name__}")
        return cls(
            model=text(body["model"], "model"),
            tensors=tensors,
            gaps_us=gaps,
            cluster=_read_cluster(body["cluster"]),
            costs=CostModel.from_json(body["costs"]),
            mode=member(Mode, body["mode"], "mode"),
            buckets=buckets,
            bucket_ready_us=ready,
            forward_us=number(body["forward_us"], "forward_us"),
            optimizer_us=number(body.get("optimizer_us", 0.0), "optimizer_us"),
            source=text(body.get("source", ""), "source"),
            meta=meta,
        )

    def save(self, path: str | Path) -> None:
        """Write ``job.json``."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read ``job.json``.

        Raises:
            JobError: the file is not JSON or not a valid job; the message begins with the path.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise JobError(f"{path}: not a JSON file ({error})") from None
        except JobError as error:
            raise JobError(f"{path}: {error}") from None


def _read_cluster(body: Any) -> Cluster:
    check_keys(body, "cluster", ("num_nodes", "ranks_per_node"), ("num_servers", "colocated"))
    try:
        return Cluster(**body)
    except ValueError as error:
        raise JobError(str(error)) from None


def _read_tensors(rows: Any) -> tuple[tuple[TensorSpec, ...], tuple[float, ...]]:
    tensors, gaps = [], []
    for position, row in enumerate(items(rows, "tensors")):
        where = f"tensors[{position}]"
        check_keys(row, where, ("name", "shape", "gap_us"), ("dtype",))
        name = text(row["name"], f"{where}.name")
        shape = tuple(whole(size, f"tensor {name!r}: shape") for size in items(row["shape"], f"{where}.shape"))
        try:
            tensors.append(TensorSpec(name, shape, text(row.get("dtype", "float32"), f"{where}.dtype")))
        except JobError:
            raise
        except ValueError as error:
            raise JobError(str(error)) from None
        gaps.append(number(row["gap_us"], f"tensor {name!r}: gap_us"))
    return tuple(tensors), tuple(gaps)


def _read_buckets(rows: Any) -> tuple[tuple[Bucket, ...] | None, tuple[float, ...] | None]:
    if rows is None:
        return None, None
    buckets, ready = [], []
    for position, row in enumerate(items(rows, "buckets")):
        where = f"buckets[{position}]"
        check_keys(row, where, ("ready_us", "slots"), ("dtype",))
        slots = []
        for slot in items(row["slots"], f"{where}.slots"):
            if not isinstance(slot, list) or len(slot) != 3:
                raise JobError(f"{where}: a slot is [tensor, offset, numel], got {slot!r}")
            slots.append(
                Slot(
                    text(slot[0], where),
                    whole(slot[1], f"{where}: offset"),
                    whole(slot[2], f"{where}: numel"),
                )
            )
        buckets.append(Bucket(position, tuple(slots), text(row.get("dtype", "float32"), f"{where}.dtype")))
        ready.append(number(row["ready_us"], f"{where}.ready_us"))
    return tuple(buckets), tuple(ready)


__all__ = ["Job", "JobError"]
