"""What ranks tell each other before there are connections: a secret, then small values, over a TCP store or MPI.

Values are sealed with the job's secret, so that a rank of another job at the same address is found out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np

from espresso.comm.environment import Launch, check_builds
from espresso.comm.errors import DisagreementError, ProtocolError, TopologyError
from espresso.comm.messages import Messages
from espresso.comm.parameter_server.secret import VARIABLE, Secret, given_secret
from espresso.comm.parameter_server.transport import Deadline, LinkError

_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Fact:
    """What a rank tells the others: what it runs, its job's size, its node and address, and its door's port."""

    build: str
    world_size: int
    node: tuple[Any, ...]
    address: str
    door: int


FACTS = Messages(Fact)


def check_alike(facts: Sequence[Fact]) -> None:
    """All ranks must run the same code, in a job of one size.

    Raises:
        DisagreementError: names the first that differs from rank 0.
    """
    check_builds({rank: fact.build for rank, fact in enumerate(facts)})
    for rank, fact in enumerate(facts):
        if fact.world_size != facts[0].world_size:
            raise DisagreementError(
                f"rank {rank} is in a job of {fact.world_size} ranks, rank 0 in one of {facts[0].world_size}: does"
                " another job use the same MASTER_ADDR and MASTER_PORT?"
            )


class Board:
    """What a job's ranks tell each other, and their secret; all call :meth:`exchange` equally often."""

    def __init__(self, mail: StoreMail | MpiMail, launch: Launch) -> None:
        self._mail, self._rank, self._ranks = mail, launch.rank, range(launch.world_size)
        self._round = 0
        self.secret = self._share(given_secret())

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's value, in rank order.

        Raises:
            LinkError: a rank did not report in time, or not what a rank of this job would.
        """
        self._round += 1
        mine = self.secret.seal(f"{self._round}/{self._rank}", FACTS.pack(value).tobytes())
        others = [rank for rank in self._ranks if rank != self._rank]
        sealed = {self._rank: mine} | self._mail.swap(self._round, mine, others, others)
        return [self._read(f"{self._round}/{rank}", rank, sealed[rank]) for rank in self._ranks]

    def _read(self, label: str, rank: int, sealed: bytes) -> Any:
        try:
            return FACTS.unpack(np.frombuffer(self.secret.unseal(label, sealed), np.uint8))
        except ProtocolError as error:
            raise LinkError(f"what rank {rank} reported cannot be read: {error}") from error

    def _share(self, given: Secret | None) -> Secret:
        """The secret of all ranks: rank 0 passes on what it makes, and nothing where its own was given."""
        if self._rank == 0:
            secret, text = Secret.fresh() if given is None else (given, "")
            self._mail.swap(0, f"secret {text}".encode(), self._ranks[1:], ())
            return secret
        told = self._mail.swap(0, b"", (), (0,))[0].decode().partition(" ")[2]
        if told and given is None:
            return Secret(told.encode())
        if given is not None and not told:
            return given
        has, lacks = (self._rank, 0) if told else (0, self._rank)
        raise TopologyError(
            f"rank {has} has {VARIABLE} in its environment, rank {lacks} has not; give it to all (mpirun -x {VARIABLE})"
        )


class StoreMail:
    """Over a TCP store: the one of torchrun's agent, else rank 0's."""

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        self._launch, self._timeout_s = launch, timeout_s
        self.where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        from_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=launch.rank == 0 and not from_agent,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            raise LinkError(
                f"rank {launch.rank} cannot reach rank 0's store at {self.where}: {str(error)[:200]}"
            ) from error
        # Rank 0's store ends with its ranks; the agent's goes on. (Counts of agents differ after a change of members.)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if from_agent else "0"
        self.store = PrefixStore(f"espresso-launch-{attempt}", store)
        if self.store.add(f"here/{launch.rank}", 1) > 1:
            raise LinkError(
                f"two processes say at {self.where} that they are rank {launch.rank}: does another job use the same"
                " MASTER_ADDR and MASTER_PORT?"
            )

    def swap(self, number: int, mine: bytes, to: Sequence[int], sources: Sequence[int]) -> dict[int, bytes]:
        """Let the others have ``mine`` as this rank's message of this number, and read theirs."""
        if to:
            self.store.set(f"{number}/{self._launch.rank}", mine.hex())
        until = Deadline(self._timeout_s)
        return {rank: self._read(f"{number}/{rank}", rank, until) for rank in sources}

    def _read(self, key: str, rank: int, until: Deadline) -> bytes:
        """What a rank wrote, once it has."""
        try:
            self.store.wait([key], timedelta(seconds=until.left_s))
            text = str(self.store.get(key).decode())
        except (RuntimeError, UnicodeDecodeError) as error:
            raise LinkError(
                f"rank {rank} of {self._launch.world_size} did not report at {self.where} within {until.seconds:g} s;"
                f" is it running? ({str(error)[:200]})"
            ) from error
        try:
            return bytes.fromhex(text)
        except ValueError:
            raise LinkError(f"what rank {rank} reported at {self.where} is no number: {text:.40}") from None


class MpiMail:
    """Over MPI's world. Message by message: a collective would wait for ever for a rank that is gone.

    Raises:
        TopologyError: MPI's world is another than the launcher's.
    """

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        from mpi4py import MPI

        self.world, self._timeout_s = MPI.COMM_WORLD, timeout_s
        self._status = MPI.Status()
        rank, size = self.world.Get_rank(), self.world.Get_size()
        if (rank, size) != (launch.rank, launch.world_size):
            raise TopologyError(
                f"the variables of {launch.launcher} say rank {launch.rank} of {launch.world_size}, MPI says rank"
                f" {rank} of {size}: start the job with the mpirun of the MPI that mpi4py uses ({MPI.get_vendor()[0]};"
                " under srun with its --mpi), or with --transport gloo"
            )

    def swap(self, number: int, mine: bytes, to: Sequence[int], sources: Sequence[int]) -> dict[int, bytes]:
        """Send ``mine``, and receive one message from every source."""
        until = Deadline(self._timeout_s)
        sends = [self.world.Isend(bytearray(mine), rank, number) for rank in to]
        found: dict[int, bytes] = {}
        while len(found) < len(sources) or not all([send.Test() for send in sends]):
            for rank in sorted(set(sources) - set(found)):
                if self.world.Iprobe(rank, number, self._status):
                    theirs = bytearray(min(self._status.Get_count(), _LARGEST_BYTES))
                    self.world.Recv(theirs, rank, number)
                    found[rank] = bytes(theirs)
            if until.is_over:
                missing = min(set(sources) - set(found), default=min(to, default=0))
                raise LinkError(f"rank {missing} did not report within {until.seconds:g} s; is it running?")
            time.sleep(1e-3)
        return found
