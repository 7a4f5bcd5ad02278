"""The routines of the decision tree over ``torch.distributed``.

Every call starts a routine and returns its *rest*, which waits until all has arrived. Routines of one group are started
in the same order on every rank; several may be under way. Exchanges are made of point-to-point transfers straight into
their place: no list collectives, no padding, no copies, and the sums that we make ourselves run in rank order. Only a
flat all-gather with several ranks on a node goes through the backend's ring, which crosses each machine's link fewer
times.

Sizes are known on both sides, so empty transfers are left out on both.

Tensors on a GPU go through NCCL, which only queues the work on the current stream. Over Gloo (several ranks on one
GPU) they pass through pinned host memory here: the calling thread, a lane's, waits for its stream, not the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from espresso.comm.member import Member

# The name changed between the versions of torch we support.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


Rest = Callable[[], object]
"""What is left of a routine that was started: waits for its end. To be called once; may raise what the backend does."""


class Waitable(Protocol):
    def wait(self) -> Any: ...


def allreduce_async(tensor: torch.Tensor, member: Member) -> Any:
    """Start an in-place sum over the group; returns the work."""
    # Not through dist.all_reduce: its checks and its log cost as much as starting the allreduce itself.
    return member.group.allreduce([tensor])


def allreduce(tensor: torch.Tensor, member: Member) -> Rest:
    """Sum over the group, in place. The library's order of additions, the same on all ranks."""
    return _through_host(tensor, member, lambda mine: allreduce_async(mine, member))


def reduce(tensor: torch.Tensor, member: Member, root: int) -> Rest:
    """Sum over the group into the root's ``tensor``, in place; elsewhere the content is lost."""
    at = member.ranks[root]
    return _through_host(tensor, member, lambda mine: dist.reduce(mine, dst=at, group=member.group, async_op=True))


def broadcast(tensor: torch.Tensor, member: Member, root: int) -> Rest:
    at = member.ranks[root]
    return _through_host(tensor, member, lambda mine: dist.broadcast(mine, src=at, group=member.group, async_op=True))


def all_to_all(
    outgoing: Sequence[torch.Tensor | None], incoming: Sequence[torch.Tensor | None], member: Member
) -> Rest:
    """Send ``outgoing[i]`` to rank i of the group, receive ``incoming[i]`` from it; own entries are ignored."""
    transfers = [(peer, outgoing[peer], incoming[peer]) for peer in range(member.size) if peer != member.index]
    return exchange_async(transfers, member)


def allgather(mine: torch.Tensor, incoming: Sequence[torch.Tensor | None], member: Member) -> Rest:
    """Send ``mine`` to every other rank, receive theirs."""
    return all_to_all([mine] * member.size, incoming, member)


def allgather_ring(mine: torch.Tensor, out: torch.Tensor, member: Member) -> Rest:
    """The backend's own all-gather: ``out`` is contiguous, ``size`` times as long as ``mine``."""
    sent = _to_host(mine) if _is_staged(mine, member) else mine
    return _through_host(
        out, member, lambda room: _all_gather_single(room, sent, group=member.group, async_op=True), filled=False
    )


def gather(mine: torch.Tensor, incoming: Sequence[torch.Tensor | None], member: Member, root: int) -> Rest:
    """The root receives everybody's tensor; the others only send."""
    if member.index == root:
        return exchange_async([(p, None, incoming[p]) for p in range(member.size) if p != root], member)
    return exchange_async([(root, mine, None)], member)


def sum_in_rank_order(mine: torch.Tensor, received: Sequence[torch.Tensor | None]) -> None:
    """``mine`` becomes the sum of all contributions, added in rank order; ``received`` is None at our place.

    The first received buffer serves as the accumulator, so nothing is allocated.
    """
    parts = [mine if part is None else part for part in received]
    if len(parts) == 1 or mine.numel() == 0:
        return
    total = parts[1] if parts[0] is mine else parts[0]
    torch.add(parts[0], parts[1], out=mine if len(parts) == 2 else total)
    for position, part in enumerate(parts[2:], start=3):
        torch.add(total, part, out=mine if position == len(parts) else total)


def exchange_async(transfers: Sequence[tuple[int, torch.Tensor | None, torch.Tensor | None]], member: Member) -> Rest:
    """Send and receive: each transfer is a peer, what goes there and what comes from there, or None."""
    # Start with the next rank and go round: not everybody sends to rank 0 first.
    ordered = sorted(transfers, key=lambda transfer: (transfer[0] - member.index) % member.size)
    receives = [(peer, tensor) for peer, _, tensor in ordered if tensor is not None and tensor.numel()]
    sends = [(peer, tensor) for peer, tensor, _ in ordered if tensor is not None and tensor.numel()]
    if not receives and not sends:
        return lambda: None
    places = receives
    if _is_staged((receives or sends)[0][1], member):
        receives = [(peer, _host_like(tensor)) for peer, tensor in places]
        sends = [(peer, _to_host(tensor)) for peer, tensor in sends]
    works = _start(receives, sends, member)

    def rest() -> None:
        for work in works:
            work.wait()
        if places is not receives:
            for (_, place), (_, host) in zip(places, receives, strict=True):
                place.copy_(host, non_blocking=True)

    return rest


def _is_staged(tensor: torch.Tensor, member: Member) -> bool:
    return tensor.is_cuda and member.is_gloo


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned copy; waits for the current stream."""
    return _host_like(tensor).copy_(tensor)


def _through_host(
    tensor: torch.Tensor, member: Member, start: Callable[[torch.Tensor], Waitable], *, filled: bool = True
) -> Rest:
    """A collective that works in place, on a host copy where the backend knows no other memory.

    ``filled``: whether it reads what is there.
    """
    if not _is_staged(tensor, member):
        return start(tensor).wait
    host = _to_host(tensor) if filled else _host_like(tensor)
    work = start(host)

    def rest() -> None:
        work.wait()
        tensor.copy_(host, non_blocking=True)

    return rest


def _start(
    receives: Sequence[tuple[int, torch.Tensor]], sends: Sequence[tuple[int, torch.Tensor]], member: Member
) -> list[Waitable]:
    if (receives and receives[0][1].is_cuda) or (sends and sends[0][1].is_cuda):
        # NCCL wants the transfers of one exchange launched together.
        operations = [
            *(dist.P2POp(dist.irecv, tensor, member.ranks[peer], member.group) for peer, tensor in receives),
            *(dist.P2POp(dist.isend, tensor, member.ranks[peer], member.group) for peer, tensor in sends),
        ]
        return list(dist.batch_isend_irecv(operations))
    works: list[Waitable] = [member.group.recv([tensor], peer, 0) for peer, tensor in receives]
    works += [member.group.send([tensor], peer, 0) for peer, tensor in sends]
    return works
