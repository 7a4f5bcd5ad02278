"""On a device an iteration is judged when the next one begins; here with a host that does likewise."""

from __future__ import annotations

from unittest.mock import patch

from espresso.comm.execute.host import HostSide
from espresso.live.session import Session
from tests.ddp import SHARDED, batch, mlp, registered, sgd, wrap
from tests.workers import run_ranks


def join_unevenly(rank: int) -> list[bool]:
    """Rank 1 has twice the batches of rank 0; after which steps this rank's replica was compared."""
    ddp, compared = wrap(mlp(20, 30, 3)), list[bool]()

    def note(session: Session, *, is_compared: bool = True) -> None:
        compared.append(is_compared)

    with (
        patch.object(HostSide, "judges_late", True),
        patch.object(Session, "check_replicas", note),
        registered(ddp, SHARDED, "efsignsgd", check_every=1) as state,
    ):
        with ddp.join():
            for number in range(3 + 3 * rank):
                ddp.zero_grad()
                ddp(batch(rank, number, 20)).square().mean().backward()
                sgd(ddp, 0.05)
        state.session.executor.conclude()
    return compared


def test_a_replica_is_compared_after_each_step_that_its_rank_took():
    compared = [outcome.value for outcome in run_ranks(join_unevenly, 2, deadline_s=60)]
    assert compared == [[True] * 3 + [False] * 3, [True] * 6]
