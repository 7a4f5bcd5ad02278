"""``python -m espresso.launch --servers 2 train.py``: a DDP script with parameter servers beside it.

    mpirun -np 6 python -m espresso.launch --servers 2 train.py --epochs 3
    torchrun --nproc-per-node 6 -m espresso.launch --servers 2 train.py --epochs 3

Of the six processes four run the script, as an ordinary world of four ranks; two serve until these have ended. The
last ranks of the job are the servers, with ``--servers-per-node`` the last ranks of every node, with both both. A
server that shares its machine with workers counts as colocated.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import sys
from collections.abc import Sequence

from espresso.comm.errors import EspressoError
from espresso.comm.parameter_server.join import Joined, ServerSettings, abort_mpi, join, linger
from espresso.comm.parameter_server.transport import LinkError
from espresso.live.codecs import HostCodecs
from espresso.strategies import Sharing

logger = logging.getLogger("espresso")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what follows the script's name is the script's."""
    parser = argparse.ArgumentParser(
        prog="python -m espresso.launch", description="Run a DDP script with parameter servers beside it."
    )
    parser.add_argument("--servers", type=int, default=0, metavar="N", help="the job's last N ranks are servers")
    parser.add_argument(
        "--servers-per-node", type=int, default=0, metavar="M", help="and of the others the last M ranks of every node"
    )
    parser.add_argument(
        "--sharing",
        choices=[sharing.value for sharing in Sharing],
        default=Sharing.MEASURED.value,
        help="what a server gets: what its card and processor bear, or by the sizes of gradients (BytePS's rule)",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "mpi", "gloo"),
        default="auto",
        help="auto: mpi under mpirun and srun where mpi4py is installed, else gloo",
    )
    parser.add_argument(
        "--connections",
        type=int,
        default=1,
        metavar="N",
        help="between a worker and a server, over which partitions go in turn (1); over Gloo",
    )
    parser.add_argument("--engines", type=int, default=4, metavar="N", help="threads of a server that add up (4)")
    parser.add_argument(
        "--server-memory-mb",
        type=int,
        default=1024,
        metavar="MB",
        help="for what was pushed and not added up yet (1024); workers wait when it is full",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="for connecting, and for a message that was announced"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="what the workers run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    options = parser.parse_args(arguments)
    if not (options.servers or options.servers_per_node):
        parser.error("give --servers, --servers-per-node or both")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the job, then serve or run the script. Returns the exit status."""
    options = parse(arguments)
    try:
        settings = ServerSettings(
            servers=options.servers,
            servers_per_node=options.servers_per_node,
            sharing=Sharing(options.sharing),
            transport=options.transport,
            connections=options.connections,
            engines=options.engines,
            memory_bytes=options.server_memory_mb << 20,
            timeout_s=options.timeout_s,
        )
        joined = join(settings)
    except (EspressoError, ValueError) as error:
        sys.stderr.write(f"espresso.launch: {error}\n")
        if isinstance(error, LinkError):  # the others are about to find out as well
            linger()
        abort_mpi(1)
        return 1
    if joined.is_server:
        return _serve(joined)
    _run_script(joined, options)
    return 0


def _serve(joined: Joined) -> int:
    codecs = HostCodecs(1)
    server = joined.server(codecs, prepare=codecs.warm_up)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        server.serve()
    except EspressoError:
        logging.shutdown()  # it is logged already
        joined.abandon(1)
    joined.close()
    return 0


def _run_script(joined: Joined, options: argparse.Namespace) -> None:
    sys.argv = [options.script, *options.arguments]
    try:
        if options.module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
            runpy.run_path(options.script, run_name="__main__")
    except BaseException as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            joined.report_and_abandon(error)
    joined.close()


if __name__ == "__main__":
    sys.exit(main())
