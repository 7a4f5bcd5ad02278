"""An open port of a process that is to serve, before there are connections: who can reach it, and who may.

::

    server                          worker
    32 random bytes          ──>
                             <──    32 random bytes, proof over both
    proof over both          ──>
"""

from __future__ import annotations

import secrets
import socket
import threading
from contextlib import suppress

from espresso.comm.parameter_server.secret import SIZE, Secret
from espresso.comm.parameter_server.transport import LinkError

_VISIT_S = 5.0
"""A visitor who says nothing for so long is put out."""


class Door:
    """Whoever connects and knows the job's secret learns that this process knows it too; others are put out."""

    def __init__(self, address: str, secret: Secret) -> None:
        self._secret = secret
        self._socket = socket.create_server((address, 0))
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._welcome, name="espresso-door", daemon=True).start()

    def _welcome(self) -> None:
        while True:
            try:
                visitor = self._socket.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._meet, args=(visitor,), name="espresso-visit", daemon=True).start()

    def _meet(self, visitor: socket.socket) -> None:
        with visitor, suppress(OSError, EOFError):
            visitor.settimeout(_VISIT_S)
            mine = secrets.token_bytes(SIZE)
            visitor.sendall(mine)
            said = _read(visitor, 2 * SIZE)
            if self._secret.proves(said[SIZE:], "worker", mine, said[:SIZE]):
                visitor.sendall(self._secret.proof("server", said[:SIZE], mine))

    def close(self) -> None:
        # Closing alone leaves a socket open that a thread waits at.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def knock(rank: int, server: int, address: str, port: int, secret: Secret, timeout_s: float) -> None:
    """Connect to a server's door.

    Raises:
        LinkError: names the server's rank and address.
    """
    where = f"server rank {server} at {address}:{port}"
    try:
        with socket.create_connection((address, port), timeout=timeout_s) as visit:
            theirs, mine = _read(visit, SIZE), secrets.token_bytes(SIZE)
            visit.sendall(mine + secret.proof("worker", theirs, mine))
            proof = _read(visit, SIZE)
    except EOFError:
        raise LinkError(
            f"worker rank {rank} was put out by what listens at {address}:{port}, where server rank {server} should be:"
            " they do not know the same secret; does another job use this address?"
        ) from None
    except OSError as error:
        raise LinkError(
            f"worker rank {rank} cannot reach {where} ({error}); is a firewall in between, or the wrong network card"
            " chosen (GLOO_SOCKET_IFNAME)?"
        ) from error
    if not secret.proves(proof, "server", mine, theirs):
        raise LinkError(f"worker rank {rank} reached {where}, which does not know this job's secret")


def _read(visit: socket.socket, num_bytes: int) -> bytes:
    """So many bytes.

    Raises:
        EOFError: the other side closed.
    """
    data = b""
    while len(data) < num_bytes:
        part = visit.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data
