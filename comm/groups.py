"""The process groups of every scope.

Every scope has groups of its own, the flat one included, made in the same order on every rank. DDP's
group and the default one are never used: DDP runs collectives there by itself, at moments of its own.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from espresso.comm.alarm import START_S, Alarm
from espresso.comm.bounded import within
from espresso.comm.connections import is_far
from espresso.comm.endpoints import Ends, ends_since, local_ends, rank_in
from espresso.comm.environment import build, check_builds, check_settings
from espresso.comm.errors import EspressoError, LostRankError, ProtocolError, TopologyError
from espresso.comm.group_names import named_after
from espresso.comm.meeting import meet
from espresso.comm.member import Gathering, Member, break_off, gathered
from espresso.comm.messages import MAX_BYTES, PLAIN
from espresso.comm.nodes import cluster_from_nodes, node_key, why_flat
from espresso.comm.upkeep import Upkeep
from espresso.comm.witness import Witness
from espresso.strategies import Cluster, Scope

logger = logging.getLogger("espresso")

LETS_GO_OF_PYTHON = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
"""Whether a process group that goes waits for its threads without Python's lock; where it keeps it, they dead-lock."""


_SLACK_S = 2.0
"""For the groups' own time-outs to come first."""

CLOSED = "espresso is closed: its process groups are gone; register the model again to go on"

_FIRST_POLL_S, _POLL_S, _LOOK_EVERY_S = 0.0005, 0.004, 2.0

_STORE_S = 2.0
"""The store may end with rank 0, which has found that somebody is missing: the others find out until then."""

PATIENCE_S = 600.0
"""A busy machine compiles the kernels of a compressor, or those of the search, in minutes: the others wait so long."""


def _checked_size(size: torch.Tensor) -> int:
    """The length of a control message, as its sender announced it."""
    if not 0 < int(size) <= MAX_BYTES:
        raise ProtocolError(f"a rank announced a control message of {int(size)} bytes")
    return int(size)


_LEFT: list[weakref.ref[Any]] = []
"""Process groups of jobs that nobody holds any more, which torch does: they go before the next ones are made."""


def _destroy(group: Any) -> None:
    with suppress(RuntimeError, ValueError, AssertionError, KeyError):  # the whole world went meanwhile
        dist.destroy_process_group(group)


class _Gone:
    """Stands where a process group was: ``None`` would mean the default one."""

    def __getattr__(self, name: str) -> Any:
        raise EspressoError(CLOSED)


class Groups:
    """The process groups of one job: flat, intra, inter, and one for control messages.

    Args:
        process_group: the ranks that train together; None means the world.
        ranks_per_node: overrides the detection of nodes.
        timeout_s: after which a collective of ours fails instead of waiting on.
        host_copies: whether the model is on a device, so that offloaded steps copy; a part of every plan.
        num_servers: parameter servers beside these ranks.
        num_colocated: how many of them share the ranks' machines.
        connections: of a link between nodes, over which exchanges go in turn. NCCL sees to its own.
        beside: groups of the ranks that hold the other shards of what this rank has a share of; every one of them is
            in a job like this one. None where every rank holds all of the model.
        before: the process group that this rank meets next; if a rank is off here, those hear of it there.

    Attributes:
        cores: that a rank may count as its own, once they were counted.

    Raises:
        TopologyError: ``ranks_per_node`` does not divide the number of ranks; or the process group has no backend for
            the device that the model is on.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        ranks_per_node: int | None = None,
        timeout_s: float = 60.0,
        host_copies: bool = False,
        num_servers: int = 0,
        num_colocated: int = 0,
        connections: int = 1,
        beside: Groups | None = None,
        before: dist.ProcessGroup | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise TopologyError("torch.distributed is not initialised; call init_process_group before espresso")
        while _LEFT:
            group = _LEFT.pop(0)()
            if group is not None:
                _destroy(group)
        parent = dist.group.WORLD if process_group is None else process_group
        self._ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(parent))
        self._whole_world = len(self._ranks) == dist.get_world_size()
        self._timeout = timedelta(seconds=timeout_s)
        self._made: list[Member] = []
        self._number = -1  # until all have met
        self._ends: list[Ends] = []
        self._link_ends: dict[str, set[int]] = {}
        self._far = False
        self._links: list[Member] = []
        self._upkeep: Upkeep | None = None
        self._pairs: Any = None
        self.rank = self._ranks.index(dist.get_rank())
        self.beside = beside
        self.cores: float | None = None
        self.timeout_s = timeout_s
        self.host_copies = host_copies
        self.alarm = Alarm(self.rank)
        self.witness = Witness(self.rank, self.alarm, self.rank_in, self._ranks)

        what, silent = "making process groups", set[int]()

        def make() -> tuple[Member, Cluster, dict[Scope, Member]]:
            meeting = meet(parent, self.alarm.card, timeout_s, before)
            self.alarm.meet(meeting.cards)
            self._number = meeting.number
            with self.explained(what):
                known = local_ends()
                self.control = self._new(self._ranks, "gloo")
                ends = ends_since(known)
                meeting.forget()  # everybody has read it
                answers = self.alarm.roll_call(START_S)
                cluster = self._find_cluster(ranks_per_node, connections, ends)
                self.alarm.excuse(answers)  # everybody lives, and has asked
                return self.control, cluster, self._make_scopes(cluster, connections if self.backend == "gloo" else 1)

        try:
            self.backend = backend_for("cuda" if host_copies else "cpu", parent)
            found = within(timeout_s + _SLACK_S, make, what, lambda: silent.update(self.witness.glance()))
            self.control, self.cluster, self.scopes = found
            self._ends = self.all_objects(local_ends())
            if self._links:
                beating = () if _operations_are_compared() else self._links
                self._upkeep = Upkeep(beating, self._link_ends, lambda: self.alarm.report())
        except BaseException as error:
            try:
                if self._number < 0 and self.rank == 0 and isinstance(error, LostRankError):
                    time.sleep(_STORE_S)
                if type(error) is EspressoError:  # it took too long; whoever met us can say who does not answer
                    self.witness.look(what, silent)
            finally:
                if isinstance(error, LostRankError) or type(error) is EspressoError:
                    self.break_off()  # what a thread that was left behind still waits for
                self.close(wait=False)
            raise
        if num_servers:
            apart = num_servers - num_colocated if num_colocated else 0
            self.cluster = replace(self.cluster, num_servers=num_servers, colocated=num_colocated > 0, num_apart=apart)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Everybody's rank in the world, by place in the job."""
        return self._ranks

    @property
    def hosts(self) -> frozenset[str]:
        """The addresses from which everybody is connected."""
        return frozenset(address for ends in self._ends for address in ends)

    @property
    def speaks(self) -> bool:
        """Whether this is the first rank of all, those of the jobs beside this one included."""
        return self.rank == 0 and (self.beside is None or self.beside.rank == 0)

    @property
    def num_ranks(self) -> int:
        return len(self._ranks)

    def all_objects(self, value: Any) -> list[Any]:
        """Everybody's ``value``, in rank order: plain values, arrays, tensors (see :mod:`espresso.comm.messages`).

        Blocks until all ranks have called it, at most for the groups' time-out; so does ``from_rank_0``.
        """
        mine = torch.from_numpy(PLAIN.pack(value))
        group = self._control_group()
        with self.explained("the ranks' messages to each other"):
            sizes = gathered(torch.tensor([mine.numel()], device="cpu"), self.num_ranks, group)
            largest = max(map(_checked_size, sizes))
            padded = torch.zeros(largest, dtype=torch.uint8, device="cpu")
            padded[: mine.numel()] = mine
            rows = gathered(padded, self.num_ranks, group)
        return [PLAIN.unpack(row[: int(size)].numpy()) for row, size in zip(rows, sizes, strict=True)]

    def by_rank(self, value: Any) -> dict[int, Any]:
        """As :meth:`all_objects`, by everybody's rank in the world."""
        return dict(zip(self._ranks, self.all_objects(value), strict=True))

    def everywhere(self, value: Any) -> list[Any]:
        """As :meth:`all_objects`, of the jobs beside this one too; the same list on all their ranks."""
        mine = self.all_objects(value)
        return mine if self.beside is None else [each for theirs in self.beside.all_objects(mine) for each in theirs]

    def all_true(self, value: bool) -> bool:
        """Whether it is true on every rank."""
        flag = torch.tensor([int(value)], device="cpu")
        with self.explained("the ranks' messages to each other"):
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._control_group())
        return bool(flag.item())

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank."""
        group, source = self._control_group(), self._ranks[0]
        message = torch.from_numpy(PLAIN.pack(value if self.rank == 0 else None))
        size = torch.tensor([message.numel()], device="cpu")
        with self.explained(f"rank {source}'s message to the others"):
            dist.broadcast(size, src=source, group=group)
            if self.rank:
                message = torch.empty(_checked_size(size), dtype=torch.uint8, device="cpu")
            dist.broadcast(message, src=source, group=group)
        return PLAIN.unpack(message.numpy())

    def for_pairs(self) -> Any:
        """The group for messages from rank to rank: where operations are compared they have a group of their own."""
        if not _operations_are_compared():
            return self._control_group()
        if self._pairs is None:
            self._pairs = self._new(self._ranks, "gloo").group
        return self._pairs

    def rank_in(self, text: str) -> int | None:
        """The other rank whose address an error of Gloo names."""
        rank = rank_in(text, self._ends)
        return None if rank == self.rank else rank

    def start_gather(self, mine: torch.Tensor, *, timed: bool = False) -> Gathering:
        """Begin to gather everybody's tensor of one shape and type on the host. Does not block.

        All ranks begin theirs between the same two iterations, or in the same hook call, as all control messages.
        """
        self._control_group()
        return Gathering(mine, self.control, self.explained, adds=False, timed=timed)

    def start_sum(self, mine: torch.Tensor) -> Gathering:
        """Begin to add up everybody's tensor, in place; otherwise as :meth:`start_gather`."""
        self._control_group()
        return Gathering(mine, self.control, self.explained, adds=True)

    def barrier(self, *, patient: bool = False) -> None:
        """Wait for everybody; past the time-out only if ``patient``, and while all ranks answer."""
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=max(self.timeout_s, PATIENCE_S)) if patient else self._timeout
        group = self._control_group()
        with self.explained("the ranks' barrier"):
            work = group.barrier(options)
            try:
                if patient:
                    self._see_to(work)
            except BaseException:  # nobody waits for it any more, and the process could not end before it does
                self.break_off()
                raise
            work.wait()

    def _see_to(self, work: Any) -> None:
        """Past the time-out, wait on only while all ranks answer, and not for one that failed."""
        look_at, pause_s = time.monotonic() + self.timeout_s, _FIRST_POLL_S
        while not work.is_completed():
            time.sleep(pause_s)
            pause_s = min(1.25 * pause_s, _POLL_S)  # who comes soon is not waited for much longer
            if time.monotonic() > look_at or self.alarm.failed():
                self.witness.look("the ranks' barrier")
                look_at = time.monotonic() + _LOOK_EVERY_S

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """A lost connection becomes an error that says whose it was."""
        try:
            yield
        except EspressoError:
            raise
        except RuntimeError as error:
            raise self.witness.explain(what, error) from error

    def break_off(self) -> None:
        """Have all collectives under way in our groups end now, with an error. The groups are of no use after it."""
        for member in self._made:
            break_off(member.group, member.index, member.size)
        if self.beside is not None:
            self.beside.break_off()

    def close(self, *, wait: bool = True) -> None:
        """Destroy the groups, unless ``destroy_process_group`` was faster. The other ranks hear that this one leaves.

        Args:
            wait: also for their threads, which end with the last reference. One of them may still have to let go of
                a callback in Python when the iteration is over; if the interpreter ends before it does, it aborts
                the process. Not where a collective is under way: they finish it first, or its time-out.
        """
        made, self._made = self._made, []
        if self._upkeep is not None:
            self._upkeep.stop()
        if self.beside is not None:
            self.beside.close(wait=wait)
        self.witness.close()
        self.alarm.close()
        if dist.is_initialized():
            for member in made:
                _destroy(member.group)
        if wait and LETS_GO_OF_PYTHON:
            for member in made:
                object.__setattr__(member, "group", _Gone())
        self._upkeep = None

    def let_go(self) -> None:
        """Stop the threads of a job that nobody holds any more, and leave its groups to those that are made next: this
        is called in any thread, and torch's tables belong to the one that makes groups. Of Gloo alone, each rank for
        itself: those of NCCL all ranks would have to end together.
        """
        made, self._made = self._made, []
        if self._upkeep is not None:
            self._upkeep.stop()
        _LEFT.extend(weakref.ref(member.group) for member in made if self.backend == "gloo")
        if self.beside is not None:
            self.beside.let_go()
        self.alarm.close()

    def _control_group(self) -> Any:
        """The group of control messages, as long as there is one."""
        if not self._made:
            raise EspressoError(CLOSED)
        return self.control.group

    def _find_cluster(self, ranks_per_node: int | None, connections: int, ends: Mapping[str, set[int]]) -> Cluster:
        # Compared before anything depends on it: ranks that disagree here would make different groups, and hang.
        mine = {"ranks_per_node": ranks_per_node, "connections": connections}
        everybody = self.by_rank((mine, node_key(), build(), is_far(ends)))
        check_builds({rank: runs for rank, (_, _, runs, _) in everybody.items()})
        self._far = any(far for *_, far in everybody.values()) and self.backend == "gloo"
        check_settings({rank: settings for rank, (settings, *_) in everybody.items()})
        if ranks_per_node is None:
            keys = [key for _, key, *_ in everybody.values()]
            why = why_flat(keys, self._ranks)
            if why is not None and self.speaks:
                logger.warning("%s: only flat options and servers are used, as with ranks_per_node=1", why)
            return cluster_from_nodes(keys)
        if ranks_per_node < 1 or self.num_ranks % ranks_per_node:
            raise TopologyError(
                f"ranks_per_node={ranks_per_node} does not divide the {self.num_ranks} ranks of this job;"
                " with ranks_per_node=1 every rank is a node of its own and all flat options work"
            )
        return Cluster(self.num_ranks // ranks_per_node, ranks_per_node)

    def _make_scopes(self, cluster: Cluster, connections: int) -> dict[Scope, Member]:
        per_node, nodes = cluster.ranks_per_node, cluster.num_nodes
        scopes = {Scope.FLAT: self._new_link(self._ranks, connections)}
        if cluster.is_hierarchical:
            rows = [self._ranks[n * per_node : (n + 1) * per_node] for n in range(nodes)]
            columns = [self._ranks[local::per_node] for local in range(per_node)]
            for scope, lists in ((Scope.INTRA, rows), (Scope.INTER, columns)):
                inter = scope is Scope.INTER
                mine = [self._new_link(r, connections) if inter else self._new(r, self.backend) for r in lists]
                scopes[scope] = next(member for member in mine if member.index >= 0)
        return scopes

    def _new_link(self, ranks: Sequence[int], connections: int) -> Member:
        """Between nodes; far apart with connections that are kept up."""
        known = local_ends()
        link = self._new(ranks, self.backend, connections)
        if self._far and link.index >= 0:
            self._links += (link, *link.others)
            for address, ports in ends_since(known).items():
                self._link_ends.setdefault(address, set()).update(ports)
        return link

    def _new(self, ranks: Sequence[int], backend: str, connections: int = 1) -> Member:
        me, others = dist.get_rank(), tuple(self._new(ranks, backend) for _ in range(connections - 1))
        if not self._whole_world and me not in ranks:
            return Member(None, tuple(ranks), -1)
        if not self._whole_world:
            self._number += 1
        with nullcontext() if self._whole_world else named_after(self._number):
            group = dist.new_group(
                list(ranks),
                timeout=self._timeout,
                backend=backend,
                use_local_synchronization=not self._whole_world,
            )
        member = Member(group, tuple(ranks), ranks.index(me) if me in ranks else -1, others)
        if me in ranks:
            self._made.append(member)
        return member


def backend_for(device: str, group: dist.ProcessGroup | None) -> str:
    """The backend that serves tensors of this kind of device: ``init_process_group()`` gives each kind its own.

    Raises:
        TopologyError: there is none.
    """
    served = dist.get_backend_config(group)
    found = dict(each.split(":", 1) for each in served.split(",")).get(device)
    if found is None:
        raise TopologyError(
            f"the model is on {'a GPU' if device == 'cuda' else 'the CPU'}, and its process group serves {served} only;"
            f' init_process_group() without a backend serves all devices that there are, "gloo" both kinds'
        )
    return found


def _operations_are_compared() -> bool:
    """Whether before each collective it is compared how many operations every rank of a group has begun, messages from
    rank to rank included: ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
    """
    level: Any = dist
    return bool(level.get_debug_level() == level.DebugLevel.DETAIL)
