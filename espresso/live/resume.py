"""Between a started job and its checkpoints: what is saved, and how a job goes on from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from espresso.comm.groups import Groups
from espresso.comm.keep.residual import Loan
from espresso.comm.keep.store import Address, Piece, Stretch
from espresso.compressors import create
from espresso.compressors.schedule import Schedule, translate
from espresso.live.checkpoint import Checkpoint, Found
from espresso.live.parts import FACTOR, RESIDUAL, VELOCITY, CheckpointError, Part, Place, cut
from espresso.live.session import Session
from espresso.live.shards import Taker
from espresso.search.budgets import Budgets, Ledger
from espresso.search.settle import is_rider
from espresso.strategies import NONE, CompressorSpec, Site, Strategy

logger = logging.getLogger("espresso")


def saved(session: Session) -> Checkpoint:
    """This rank's part of a checkpoint, as everything is now. Nothing is copied yet, and nobody else is asked, but
    parameter servers for this rank's share.
    """
    session.executor.judge()
    stretches = [(RESIDUAL, stretch) for stretch in session.store.lend()]
    if session.velocities is not None:
        stretches += [(VELOCITY, stretch) for stretch in session.velocities.lend()]
    numbers, shards = place(session).parts, session.model.shards
    strategy = session.decider.strategy if session.decider.decided else None
    factors = [(FACTOR, Stretch(n, None, 0, v.size, 0, Loan(v))) for n, v in session.factors.snapshot().items()]
    if shards is not None:  # factors too are each shard's own
        stretches = [(held, shards.whole(held, stretch)) for held, stretch in stretches + factors]
        factors, strategy = [], strategy and strategy.over(shards.wholes)
    return Checkpoint(
        model=session.model.wholes,
        cluster=session.groups.cluster.shape,
        num_shards=1 if session.groups.beside is None else session.groups.beside.num_ranks,
        step=session.executor.next_step,
        epoch=session.follower.epoch,
        strategy=strategy,
        factors=Part(factors),
        parts=dict(zip(numbers, cut(stretches, len(numbers)), strict=True)),
    )


def gathered(session: Session) -> Checkpoint:
    """The whole checkpoint, on every rank. Collective."""
    session.executor.conclude()  # what the planner asks of all ranks comes first, on all of them
    mine = saved(session)
    everybody = session.groups.everywhere({number: part.packed() for number, part in mine.parts.items()})
    return replace(mine, parts={number: Part(read=part) for theirs in everybody for number, part in theirs.items()})


def load(session: Session, body: Checkpoint | Mapping[str, Any], *, strict: bool = True) -> tuple[str, ...]:
    """Go on from a checkpoint, read or not. All ranks together; returns what was dropped.

    Raises:
        CheckpointError: it does not fit this rank, model or job; nothing has changed then.
    """
    session.executor.conclude()
    tensors, groups, shards = session.model.tensors, session.groups, session.model.shards
    numels = {tensor.name: tensor.numel for tensor in tensors}
    taker = None if shards is None or groups.beside is None else Taker(shards, groups.beside, numels)
    num_shards = 1 if taker is None else taker.beside.num_ranks
    wrong, said, owing = "", "", set[str]()
    try:
        checkpoint = body if isinstance(body, Checkpoint) else Checkpoint.parse(body)
        said = _said(checkpoint)
        found = checkpoint.found(
            place(session), groups.cluster, session.model.wholes, strict=strict, num_shards=num_shards
        )
        strategy = _to_resume(session, found, checkpoint)
        schedule = None if strategy is None else session.check(strategy)
    except CheckpointError as error:
        wrong = str(error)
    except ValueError as error:
        wrong = f"the strategy in the checkpoint: {error}"
    else:
        owing = found.owing
    everybody = groups.everywhere((dist.get_rank(), wrong, said, sorted(owing)))
    for rank, theirs, _, _ in everybody:  # nobody goes on where somebody cannot
        if theirs:
            raise CheckpointError(wrong or f"rank {rank} cannot load its checkpoint: {theirs}")
    for rank, _, theirs, _ in everybody:
        if theirs != everybody[0][2]:
            raise CheckpointError(
                f"ranks would go on from different checkpoints: rank {everybody[0][0]} from one of {everybody[0][2]},"
                f" rank {rank} from one of {theirs}; load those of one save"
            )
    owing = {name for *_, names in everybody for name in names}
    kept = found.kept(taker)
    residuals, velocities = kept.residuals.pieces, kept.velocities.pieces
    if checkpoint.cluster == groups.cluster.shape and groups.cluster.is_hierarchical:
        residuals, velocities = _with_replicas(groups, (residuals, velocities))
    if strategy is not None and schedule is not None:
        session.adopt(strategy, schedule, kept.step, kept.epoch, decides_on=True)
    if owing and groups.beside is not None:  # an inf in one shard keeps what all of them owe
        session.executor.agree = groups.beside.all_true
    session.follower.epoch = kept.epoch
    session.restart(kept.step, owing & {tensor.name for tensor in session.model.tensors})  # a shard may lack some
    session.factors.load(dict(kept.factors))
    if session.store.remote is not None:
        session.store.remote.reset()
        groups.barrier()  # nobody gives servers anything before they have forgotten what they kept
    session.store.load(residuals, kept.residuals.carry, numels)
    if session.store.remote is not None:
        groups.barrier()  # and nobody saves before all have given them theirs
    if session.velocities is not None:
        session.velocities.load(velocities, kept.velocities.carry, numels)
    session.runtime.place.settle()  # lanes read it on other streams
    dropped = found.dropped
    if session.velocities is None and (velocities or kept.velocities.carry):
        dropped += ("the velocities of momentum correction, which this job does not do",)
    if dropped:
        logger.warning("of the checkpoint was dropped: %s", "; ".join(dropped))
    return dropped


def _said(checkpoint: Checkpoint) -> str:
    """What is the same in every rank's file of one save, for people."""
    nodes, per_node = checkpoint.cluster
    strategy = "no strategy" if checkpoint.strategy is None else f"strategy {checkpoint.strategy.digest[:8]}"
    epoch = "" if checkpoint.epoch is None else f" of epoch {checkpoint.epoch}"
    shards = f" and {checkpoint.num_shards} shards" if checkpoint.num_shards > 1 else ""
    return f"step {checkpoint.step}{epoch}, {nodes}x{per_node} ranks{shards}, {strategy}"


def place(session: Session | None, group: dist.ProcessGroup | None = None) -> Place:
    """This rank's, in a job; before its start in the group that trains together, else alone."""
    if session is not None:
        groups, beside = session.groups, session.groups.beside
        if beside is None:
            return Place(groups.rank, groups.num_ranks)
        return Place(groups.rank * beside.num_ranks + beside.rank, groups.num_ranks * beside.num_ranks)
    if dist.is_available() and dist.is_initialized():
        return Place(dist.get_rank(group), dist.get_world_size(group))
    return Place(0, 1)


Pieces = Mapping[Address, Sequence[Piece]]


def _with_replicas(groups: Groups, stores: Sequence[Pieces]) -> list[Pieces]:
    """Pieces of sites that all nodes keep alike were saved once, by the first node: the others get them from there."""
    node, local = divmod(groups.rank, groups.cluster.ranks_per_node)
    shared = [site for site in Site if site.replicas(groups.cluster) > 1]
    mine = [
        [(name, site.value, list(parts)) for (name, site), parts in pieces.items() if site in shared]
        for pieces in stores
    ]
    theirs = groups.all_objects(mine)[local]
    if node == 0:
        return list(stores)
    return [
        {**pieces, **{(n, Site(s)): [(at, values, node) for at, values, _ in parts] for n, s, parts in rows}}
        for pieces, rows in zip(stores, theirs, strict=True)
    ]


def _to_resume(session: Session, found: Found, checkpoint: Checkpoint) -> Strategy | None:
    """What automatic mode had decided, unless the user gives a strategy now, the job is only measured, the cluster is
    another, or what is given now does not allow it: then it is decided anew. The same on all ranks, shards' too.

    It names the compressors that were in force then; the schedule is given now.
    """
    strategy, given, groups = found.strategy, session.given, session.groups
    if strategy is None or isinstance(given.strategy, Strategy) or session.profile_only:
        return None
    if strategy.cluster.shape != groups.cluster.shape:
        return None
    now = {spec: _as_given(session, spec, checkpoint) for spec in strategy.compressors - {NONE}}
    strategy = translate(strategy, {spec: one for spec, one in now.items() if one is not None})
    why = _why_not(session, strategy, [spec for spec, one in now.items() if one is None])
    in_force = session.follower.following(Schedule(strategy.compressors), checkpoint.step, checkpoint.epoch).in_force
    if NONE in in_force.values():
        why = why or "a compressor of it begins later now"
    if why:
        if groups.speaks:
            logger.warning("the checkpoint's strategy is not resumed, automatic mode decides anew: %s", why)
        return None
    return strategy if session.model.shards is None else strategy.over(session.model.tensors)


def _why_not(session: Session, strategy: Strategy, gone: Sequence[CompressorSpec]) -> str:
    """What forbids a strategy of the whole model now; empty if nothing does."""
    terms = session.config.terms
    if gone:
        return f"{', '.join(sorted(map(str, gone)))} is none of the compressors that are given now"
    if strategy.num_through_servers and not session.groups.cluster.num_servers:
        return "it goes through parameter servers, and there are none"
    if session.groups.host_copies and any(choice.option.moves_matrices for choice in strategy.choices.values()):
        return "it transforms matrices on another device than it compresses them on, as no job on GPUs can"
    for tensor in strategy.tensors:
        if not terms.constraints.allows(strategy.choices[tensor.name], terms.constraints.kind_of(tensor)):
            return f"tensor {tensor.name!r} may not take what it took"
    beside = session.groups.beside
    most = terms.budgets.residual_bytes * (1 if beside is None else beside.num_ranks)
    ledger = Ledger(
        strategy.tensors, strategy.cluster, tuple(strategy.compressors), None, Budgets(residual_bytes=most),
        storage=terms.residual_dtype, transactional=terms.transactional,
    )  # fmt: skip
    # What rides has a residual as long as it is, wherever there is one to ride with.
    carriers = {choice.option: choice for choice in strategy.choices.values() if choice.compressor != NONE}
    kept = {n: carriers.get(c.option, c) if is_rider(c) else c for n, c in strategy.choices.items()}
    return "" if ledger.allows(kept) else "its residuals take more memory than they may"


def _differ_in_time(scheduled: CompressorSpec, spec: CompressorSpec) -> bool:
    """Whether two specs are the same but for what a schedule moves."""
    compressor = create(scheduled)
    given, other = compressor.params(), create(spec).params()
    apart = {name for name in {*given, *other} if given.get(name) != other.get(name)}
    return apart <= compressor.scheduled | {"residual_dtype"}


def _as_given(session: Session, spec: CompressorSpec, checkpoint: Checkpoint) -> CompressorSpec | None:
    """Which of those that are given now was ``spec`` at the checkpoint's step; or one of its name whose schedule is
    another now. None: there is none.
    """
    every = list(dict.fromkeys((*session.given.compressors, *session.config.terms.constraints.forced())))
    follower = session.follower.following(Schedule(every), checkpoint.step, checkpoint.epoch)
    was = [one for one, then in follower.in_force.items() if then.kept_as("") == spec.kept_as("")]
    was.sort(key=lambda one: one.residual_dtype != spec.residual_dtype)
    scheduled = [one for one in every if one.name == spec.name and create(one).is_scheduled]
    scheduled = [one for one in scheduled if _differ_in_time(one, spec)]
    one = next(iter((*was, *scheduled)), None)
    return one if one is None or one.residual_dtype else one.kept_as(spec.residual_dtype)
