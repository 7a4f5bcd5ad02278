"""The plan: a strategy laid over a job's buckets, as groups, partitions and tasks on lanes.

``plan`` is the one function that search, timeline and executor share::

    bucket   b0 [ w1 | b1 | w2 ]             what DDP hands over (paper mode: one tensor each)
    groups   g0 [ w1 | w2 ]  g1 [ b1 ]       tensors of a bucket with equal choices, or of equal options where one
                                             of two does not compress: it rides raw in the other's payload
    parts    p0 [ w1... ]  p1 [ ...w2 ]      a group cut at the partition size
    tasks    p0: comp > exchange > dec       one task per step (and host copy) of the option

All lane orders are projections of one total order over the tasks of a whole backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from espresso.strategies.cluster import Cluster
from espresso.strategies.flow import StepFlow, trace
from espresso.strategies.option import Device, Option, Routine, Scope, Step, StepKind, Word
from espresso.strategies.spec import NONE
from espresso.strategies.strategy import DTYPES, Choice, Strategy, StrategyError


class Mode(Word):
    """Whose grouping a plan, a prediction or a certificate is for."""

    PAPER = "paper"
    DDP = "ddp"


class Lane(Word):
    """Where tasks queue. A flat routine holds every link there is; the last three are all servers' together."""

    TRAINING = "training"
    OFFLOAD = "offload"
    COPY = "copy"
    INTRA = "intra"
    INTER_OUT = "inter_out"
    INTER_IN = "inter_in"
    SERVER_IN = "server_in"
    SERVER = "server"
    SERVER_OUT = "server_out"


RANK_LANES = (Lane.TRAINING, Lane.OFFLOAD, Lane.COPY)
"""A rank's own: in which order they take their tasks is of no matter to other ranks."""

LINK_LANES = (Lane.INTRA, Lane.INTER_OUT, Lane.INTER_IN, Lane.SERVER_IN, Lane.SERVER_OUT)
"""Those that exchanges cross one at a time, while others may be on their way."""


class Stage(Word):
    """A task is a step itself or a copy between device and host: around an offloaded step, before a push, after a pull.

    Servers take and give bytes of the host; a CPU job copies nothing.
    """

    COPY_TO_HOST = "copy_to_host"
    STEP = "step"
    COPY_TO_DEVICE = "copy_to_device"


def stages_of(step: Step, host_copies: bool) -> tuple[Stage, ...]:
    """The tasks of a step, in order; ``host_copies`` as for :func:`plan`."""
    works_on_host = host_copies and step.device is Device.OFFLOAD
    sends_from_host = host_copies and step.routine is Routine.PUSH
    answers_on_host = host_copies and step.routine is Routine.PULL
    return (
        *((Stage.COPY_TO_HOST,) if works_on_host or sends_from_host else ()),
        Stage.STEP,
        *((Stage.COPY_TO_DEVICE,) if works_on_host or answers_on_host else ()),
    )


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor's place in a bucket: ``numel`` elements from ``offset``."""

    tensor: str
    offset: int
    numel: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat gradient buffer of one dtype; buckets are numbered in the order they become ready."""

    index: int
    slots: tuple[Slot, ...]
    dtype: str = "float32"

    @classmethod
    def packed(cls, index: int, numels: Iterable[tuple[str, int]], dtype: str = "float32") -> Bucket:
        """Of tensors with so many elements, one behind the other."""
        slots, offset = [], 0
        for tensor, numel in numels:
            slots.append(Slot(tensor, offset, numel))
            offset += numel
        return cls(index, tuple(slots), dtype)

    @property
    def numel(self) -> int:
        return sum(slot.numel for slot in self.slots)


@dataclass(frozen=True, slots=True)
class Run:
    """A stretch of one tensor inside a group: where it lies in tensor, group and bucket (elements).

    ``shape`` is the whole tensor's; ``exact`` says that it travels raw inside the group's payload.
    """

    tensor: str
    tensor_start: int
    group_start: int
    bucket_start: int
    numel: int
    shape: tuple[int, ...] = ()
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of one bucket that share an option, and its payloads: the unit of execution.

    ``choice`` is that of all runs that are not exact.
    """

    index: int
    bucket: int
    choice: Choice
    runs: tuple[Run, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return sum(run.numel for run in self.runs)

    def segments(self, start: int, stop: int) -> tuple[Run, ...]:
        """The runs inside ``[start, stop)`` of the group, clipped; empty ones left out."""
        clipped = []
        for run in self.runs:
            low = max(start, run.group_start)
            high = min(stop, run.group_start + run.numel)
            if low < high:
                skip = low - run.group_start
                at, where = run.tensor_start + skip, run.bucket_start + skip
                clipped.append(Run(run.tensor, at, low, where, high - low, run.shape, run.exact))
        return tuple(clipped)


@dataclass(frozen=True, slots=True)
class Partition:
    """``[start, stop)`` of a group; ``root`` is the counter from which rooted routines take their root."""

    index: int
    group: int
    start: int
    stop: int
    root: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Task:
    """One step of one partition on its lanes. ``after`` is the task of the same partition it follows."""

    index: int
    partition: int
    step_index: int
    step: Step
    stage: Stage
    lanes: tuple[Lane, ...]
    after: int | None


@dataclass(frozen=True)
class Plan:
    """Everything both interpreters need, in tuples addressed by index.

    ``order`` lists all task indices: a topological order in which every link takes its tasks.
    """

    mode: Mode
    cluster: Cluster
    buckets: tuple[Bucket, ...]
    groups: tuple[Group, ...]
    partitions: tuple[Partition, ...]
    tasks: tuple[Task, ...]
    order: tuple[int, ...]

    def with_order(self, order: Sequence[int]) -> Plan:
        """The same plan in another total order.

        Raises:
            ValueError: not a permutation, or a task before the one it follows.
        """
        if sorted(order) != list(range(len(self.tasks))):
            raise ValueError("order must name every task exactly once")
        place = {task: position for position, task in enumerate(order)}
        for task in self.tasks:
            if task.after is not None and place[task.after] > place[task.index]:
                raise ValueError(f"order has task {task.index} before task {task.after}, which it follows")
        return replace(self, order=tuple(order))

    @cached_property
    def tasks_of_partition(self) -> tuple[tuple[int, ...], ...]:
        """For every partition, its task indices, in step order."""
        lists: list[list[int]] = [[] for _ in self.partitions]
        for task in self.tasks:
            lists[task.partition].append(task.index)
        return tuple(map(tuple, lists))

    @cached_property
    def position_of_bucket(self) -> dict[int, int]:
        """Where the bucket with a number stands in ``buckets``."""
        return {bucket.index: position for position, bucket in enumerate(self.buckets)}

    @cached_property
    def tasks_of_bucket(self) -> tuple[tuple[int, ...], ...]:
        """For every bucket, its task indices, in index order."""
        lists: list[list[int]] = [[] for _ in self.buckets]
        for task in self.tasks:
            bucket = self.groups[self.partitions[task.partition].group].bucket
            lists[self.position_of_bucket[bucket]].append(task.index)
        return tuple(map(tuple, lists))

    def flows(self, partition: int, rank: int) -> tuple[StepFlow, ...]:
        """What ``rank`` does for a partition, step by step."""
        part = self.partitions[partition]
        group = self.groups[part.group]
        return trace(group.choice.option, self.cluster, part.numel, rank, part.root)


_LANE_OF = {
    Device.TRAINING: Lane.TRAINING,
    Device.OFFLOAD: Lane.OFFLOAD,
    Device.SERVER: Lane.SERVER,
}


def lanes_of(step: Step, cluster: Cluster) -> tuple[Lane, ...]:
    """The lanes a step holds while it runs."""
    if step.kind is not StepKind.COMMUNICATE:
        assert step.device is not None
        return (_LANE_OF[step.device],)
    if step.routine is Routine.PUSH:
        return (Lane.INTER_OUT, Lane.SERVER_IN)
    if step.routine is Routine.PULL:
        return (Lane.INTER_IN, Lane.SERVER_OUT)
    if step.scope is Scope.INTRA or cluster.num_nodes == 1:
        return (Lane.INTRA,)
    if step.scope is Scope.INTER or cluster.ranks_per_node == 1:
        return (Lane.INTER_OUT, Lane.INTER_IN)
    return (Lane.INTRA, Lane.INTER_OUT, Lane.INTER_IN)


def paper_buckets(strategy: Strategy, names: Sequence[str]) -> tuple[Bucket, ...]:
    """Each tensor its own bucket, in the order given: the paper's mode."""
    by_name = {tensor.name: tensor for tensor in strategy.tensors}
    return tuple(
        Bucket(index, (Slot(name, 0, by_name[name].numel),), by_name[name].dtype) for index, name in enumerate(names)
    )


def plan(
    strategy: Strategy,
    buckets: Sequence[Bucket],
    *,
    mode: Mode = Mode.DDP,
    host_copies: bool = False,
) -> Plan:
    """Lay ``strategy`` over ``buckets``.

    Args:
        strategy: choices by tensor name; must know every tensor of the buckets.
        buckets: in the order in which they become ready.
        mode: recorded in the plan; the buckets themselves make the difference.
        host_copies: whether offloaded steps and parameter servers need copies between device and host (not in a
            CPU job).

    Returns:
        A plan in the plain order: bucket by bucket, partitions pipelined within a group.

    Raises:
        ValueError: a bucket holds a tensor that the strategy does not know.
        StrategyError: matrices of several rounds would have to be copied between devices.
    """
    groups: list[Group] = []
    partitions: list[Partition] = []
    tasks: list[Task] = []
    order: list[int] = []
    for bucket in buckets:
        for choice, slots in _by_choice(bucket, strategy.choices):
            if host_copies and choice.option.moves_matrices:
                raise StrategyError(
                    f"tensor {slots[0].tensor!r}: option '{choice.option}' transforms on another device than it"
                    " compresses on, and the matrices stay where they were compressed: put both steps on the training"
                    " device, or both on the pool"
                )
            group = _group(len(groups), bucket, choice, slots, strategy)
            groups.append(group)
            limit = partition_limit(choice, strategy.partition_bytes, bucket.dtype)
            waves: list[tuple[int, int, int]] = []
            for number, (start, stop) in enumerate(partition_spans(group.numel, limit)):
                part = Partition(len(partitions), group.index, start, stop, root=len(partitions))
                partitions.append(part)
                for depth, task in enumerate(_tasks(part, choice, strategy.cluster, len(tasks), host_copies)):
                    waves.append((number + depth, number, task.index))
                    tasks.append(task)
            order += [index for _, _, index in sorted(waves)]
    return Plan(mode, strategy.cluster, tuple(buckets), tuple(groups), tuple(partitions), tuple(tasks), tuple(order))


def _by_choice(bucket: Bucket, choices: Mapping[str, Choice]) -> list[tuple[Choice, list[Slot]]]:
    """The groups of a bucket: slots in their order, the first that was met first."""
    carriers: dict[Option, Choice] = {}
    for slot in bucket.slots:
        if slot.tensor not in choices:
            raise ValueError(f"bucket {bucket.index} holds tensor {slot.tensor!r}, which the strategy does not know")
        choice = choices[slot.tensor]
        if choice.compressor != NONE and choice.option.carries_payloads:
            carriers.setdefault(choice.option, choice)
    grouped: dict[Choice, list[Slot]] = {}
    for slot in bucket.slots:
        choice = choices[slot.tensor]
        rides = choice.compressor == NONE
        grouped.setdefault(carriers.get(choice.option, choice) if rides else choice, []).append(slot)
    return list(grouped.items())


def _group(
    index: int,
    bucket: Bucket,
    choice: Choice,
    slots: Sequence[Slot],
    strategy: Strategy,
) -> Group:
    runs = []
    position = 0
    for slot in slots:
        exact = strategy.choices[slot.tensor] != choice
        runs.append(Run(slot.tensor, 0, position, slot.offset, slot.numel, strategy.shapes[slot.tensor], exact))
        position += slot.numel
    return Group(index, bucket.index, choice, tuple(runs), bucket.dtype)


def partition_limit(choice: Choice, partition_bytes: int, dtype: str) -> int:
    """Elements a partition may have, 0 for no limit: a compressor of several rounds works on whole tensors."""
    return 0 if choice.option.num_rounds > 1 else partition_bytes // DTYPES[dtype]


def partition_spans(numel: int, limit: int) -> list[tuple[int, int]]:
    """Equal partitions of at most ``limit`` elements, rounded up to whole cache lines; one if there is no limit."""
    if limit <= 0 or numel <= limit:
        return [(0, numel)]
    count = -(-numel // limit)
    size = -(-numel // (count * 64)) * 64
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


def _tasks(part: Partition, choice: Choice, cluster: Cluster, first: int, host_copies: bool) -> list[Task]:
    stages = [
        (position, step, stage)
        for position, step in enumerate(choice.option.steps)
        for stage in stages_of(step, host_copies)
    ]
    return [
        Task(
            index=first + number,
            partition=part.index,
            step_index=position,
            step=step,
            stage=stage,
            lanes=lanes_of(step, cluster) if stage is Stage.STEP else (Lane.COPY,),
            after=first + number - 1 if number else None,
        )
        for number, (position, step, stage) in enumerate(stages)
    ]
