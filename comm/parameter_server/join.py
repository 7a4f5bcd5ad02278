"""How a process becomes a worker or a server: roles, addresses, connections, and the world that DDP sees.

1  the launcher's variables say rank and size (espresso.comm.environment)
2  all ranks share a secret and tell each other their node and address, over MPI or a TCP store (board)
3  the last ranks (of the job or of every node) are servers; workers come first in the new numbering
4  every worker knocks at every server's door, so that an unreachable one is named at once
5  transports connect, workers and servers prove to each other that they know the secret
6  workers get RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of a world of their own
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from espresso.comm.environment import Launch, build, export_worker, is_one_host, local_address, read_environment
from espresso.comm.errors import TopologyError
from espresso.comm.member import LONGEST_S, MAX_CONNECTIONS
from espresso.comm.memory import Codecs
from espresso.comm.nodes import node_key
from espresso.comm.parameter_server import connect
from espresso.comm.parameter_server.board import Board, Fact, MpiMail, StoreMail, check_alike
from espresso.comm.parameter_server.client import Client
from espresso.comm.parameter_server.secret import Door, introduce, knock
from espresso.comm.parameter_server.server import Server
from espresso.comm.parameter_server.transport import GlooTransport, LinkError, MpiTransport, Transport
from espresso.strategies import Sharing

logger = logging.getLogger("espresso")

_LINGER_S = 3.0
"""Who fails stays so long, so that others can say what happened to them before the launcher ends them."""

_FAREWELL_S = 5.0
"""How long who fails waits for the servers' answer to its leaving."""

_LAST_S = 30.0
"""Whatever holds up an end after an error (a launcher's abort that waits for the dead) is cut off after so long."""


@dataclass(frozen=True)
class ServerSettings:
    """What the launcher's command line says.

    Attributes:
        servers: the job's last ranks are servers, so many; and
        servers_per_node: so are the last of the others on every node, so many.
        transport: ``auto``, ``mpi`` or ``gloo``.
        engines: threads of a server that add up.
        memory_bytes: of a server, for what was pushed and not added up yet.
        timeout_s: for connecting and for messages that were announced.
        sharing: how gradients are shared out over the servers.
        connections: between a worker and a server, over Gloo.
    """

    servers: int = 0
    servers_per_node: int = 0
    transport: str = "auto"
    engines: int = 4
    memory_bytes: int = 1 << 30
    timeout_s: float = 300.0
    sharing: Sharing = Sharing.MEASURED
    connections: int = 1

    def __post_init__(self) -> None:
        if self.servers + self.servers_per_node < 1 or min(self.servers, self.servers_per_node) < 0:
            raise ValueError(
                "give a number of servers above 0: of the job (--servers), on every node (--servers-per-node), or both"
            )
        if self.engines < 1 or self.memory_bytes < 1:
            raise ValueError("engines and server memory must be above 0")
        if not 0 < self.timeout_s <= LONGEST_S:
            raise ValueError(f"the time-out must be above 0 and up to {LONGEST_S:g} s, got {self.timeout_s:g}")
        if not 1 <= self.connections <= MAX_CONNECTIONS:
            raise ValueError(f"connections must be 1 to {MAX_CONNECTIONS}, got {self.connections}")


@dataclass(frozen=True)
class Roles:
    """The launcher's ranks by role, each in ascending order; servers on machines of workers before the others."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Workers first, then servers: place i is rank i of the transport."""
        return self.workers + self.servers


def assign_roles(nodes: Sequence[tuple[Any, ...]], settings: ServerSettings) -> Roles:
    """Who serves, from everybody's node in the order of the launcher's ranks.

    Raises:
        TopologyError: no worker would be left.
    """
    left = max(len(nodes) - settings.servers, 0)
    serving = set(range(left, len(nodes)))
    members: dict[tuple[Any, ...], list[int]] = {}
    for rank in range(left):
        members.setdefault(nodes[rank], []).append(rank)
    for on in members.values() if settings.servers_per_node else ():
        serving.update(on[-settings.servers_per_node :])
    workers = tuple(rank for rank in range(left) if rank not in serving)
    near = {nodes[rank] for rank in workers}
    servers = tuple(sorted(serving, key=lambda rank: (nodes[rank] not in near, rank)))
    if not workers:
        raise TopologyError(
            f"{len(servers)} servers of {len(nodes)} ranks leave no worker; start more processes or fewer servers"
        )
    return Roles(workers, servers)


@dataclass(frozen=True)
class Joined:
    """This process's place in the job; its ``client`` if it is a worker."""

    transport: Transport
    num_workers: int
    client: Client | None
    settings: ServerSettings
    uses_mpi: bool

    @property
    def is_server(self) -> bool:
        return self.client is None

    def server(self, codecs: Codecs, prepare: Callable[[Any, Any], None]) -> Server:
        """The server that this process is to run."""
        return Server(
            self.transport,
            self.num_workers,
            codecs,
            engines=self.settings.engines,
            timeout_s=self.settings.timeout_s,
            memory_bytes=self.settings.memory_bytes,
            prepare=prepare,
        )

    def close(self) -> None:
        """Leave; servers end when all workers have. Where one does not answer, the process ends here, with an error."""
        try:
            if self.client is not None:
                self.client.leave(self.settings.timeout_s)
        except LinkError as error:
            self.report_and_abandon(error)
        self.transport.close()

    def report_and_abandon(self, error: BaseException) -> NoReturn:
        """After an exception that nobody caught: say what it was, do what was to be done at exit, and end.

        Orderly ways out, MPI's among them, wait for ranks that can no longer get there, or for threads that wait for
        them. A ``SystemExit`` says what it says to Python, and gives its status.
        """
        _end_within(_LAST_S)
        status = 1
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        elif isinstance(error.code, int):
            status = error.code
        else:
            sys.stderr.write(f"{error.code}\n")
        if self.client is not None:
            with suppress(LinkError):
                self.client.leave(_FAREWELL_S)
        atexit._run_exitfuncs()
        self.abandon(status)

    def abandon(self, status: int) -> NoReturn:
        """End at once: peers are gone, and orderly ways out would wait for them."""
        _end_within(_LAST_S)
        if self.is_server or self.uses_mpi:
            linger()
        abort_mpi(status)
        os._exit(status)


def linger() -> None:
    """Stay a moment after a failure: the job's store may be this rank's, and a launcher ends the others with it."""
    sys.stderr.flush()
    time.sleep(_LINGER_S)


def _end_within(seconds: float) -> None:
    """End this process then, with status 1 and every thread's stack, also from a call that holds the interpreter."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def abort_mpi(status: int) -> None:
    """End the job if MPI runs: its orderly end would wait for ranks that wait for this one."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(status)


def join(settings: ServerSettings) -> Joined:
    """Take this process's place. All ranks of the launch together.

    Raises:
        TopologyError: no launcher, another world in MPI, or no worker would be left.
        LinkError: somebody cannot be reached; says who and where.
    """
    launch = read_environment()
    if launch is None:
        raise TopologyError(
            "espresso.launch runs inside a launcher: torchrun … -m espresso.launch … or mpirun … python -m"
            " espresso.launch …"
        )
    uses_mpi = _uses_mpi(launch, settings.transport)
    if not uses_mpi:
        _default_master(launch)
    address = local_address()
    mail = MpiMail(launch, settings.timeout_s) if uses_mpi else StoreMail(launch, settings.timeout_s)
    board = Board(mail, launch)
    door = Door(address, board.secret)
    facts = board.exchange(Fact(build(), launch.world_size, node_key(), address, door.port))
    check_alike(facts)
    roles = assign_roles([fact.node for fact in facts], settings)
    rank = roles.order.index(launch.rank)
    if rank < len(roles.workers):
        for number, fact in enumerate((facts[server] for server in roles.servers), start=len(roles.workers)):
            knock(rank, number, fact.address, fact.door, board.secret, min(settings.timeout_s, 20.0))
    board.exchange(None)
    door.close()
    transport = _transport(mail, roles, rank, settings)
    first_server = len(roles.workers)
    others = range(first_server, transport.size) if rank < first_server else range(first_server)
    introduce(transport, others, board.secret, settings.timeout_s)
    client = None
    if rank < first_server:
        _enter_world(roles, facts, rank)
        near = Counter(facts[worker].node for worker in roles.workers)
        homes = [facts[server].node for server in roles.servers]
        client = Client(
            transport,
            first_server,
            addresses=[facts[server].address for server in roles.servers],
            near=[near[home] / first_server for home in homes],
            machines=[homes.index(home) for home in homes],
            engines=settings.engines,
            sharing=settings.sharing,
        )
        connect(client)
    return Joined(transport, first_server, client, settings, uses_mpi)


def _uses_mpi(launch: Launch, wanted: str) -> bool:
    """Whether ranks meet over MPI.

    Raises:
        TopologyError: MPI is wanted, and cannot be loaded.
    """
    if wanted == "gloo" or (wanted == "auto" and launch.launcher == "torchrun"):
        return False
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:  # the package, or the library that it loads
        if wanted == "mpi":
            raise TopologyError(
                f"--transport mpi needs mpi4py and an MPI library: {error}; install what is missing, or start with"
                " --transport gloo"
            ) from error
        if not isinstance(error, ModuleNotFoundError):
            logger.warning("MPI cannot be loaded (%s); espresso.launch goes on over Gloo", error)
        return False
    return True


def _default_master(launch: Launch) -> None:
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return
    if not is_one_host(launch, os.environ):
        raise TopologyError(
            "several nodes without MPI: set MASTER_ADDR and MASTER_PORT to an address of rank 0's machine"
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def _transport(mail: MpiMail | StoreMail, roles: Roles, rank: int, settings: ServerSettings) -> Transport:
    if isinstance(mail, MpiMail):
        return MpiTransport(mail.world, list(roles.order))
    return GlooTransport(mail.store, rank, len(roles.order), settings.timeout_s, settings.connections)


def _enter_world(roles: Roles, facts: Sequence[Fact], rank: int) -> None:
    """Write the variables of the workers' world."""
    mine = facts[roles.workers[rank]].node
    near = [index for index, worker in enumerate(roles.workers) if facts[worker].node == mine]
    export_worker(rank, len(roles.workers), near.index(rank), len(near), master=facts[roles.workers[0]].address)
