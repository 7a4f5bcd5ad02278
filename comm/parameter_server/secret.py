"""The job's secret: only who knows it is taken for a rank of the job.

The secret is ``ESPRESSO_JOB_SECRET`` in the environment of every rank (``mpirun -x``). Where rank 0 has none it makes
one and passes it on as the launch's facts are: over MPI, or through the job's store, to which torch lets everybody
connect. It is sent nowhere else. Each side sends the other a fresh random challenge, and answers with an HMAC (SHA-256)
over both challenges and who it is.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np

from espresso.comm.errors import ProtocolError, TopologyError
from espresso.comm.parameter_server.transport import Channel, Deadline, LinkError, Pending, Transport, wait_for
from espresso.comm.parameter_server.wire import Tag

VARIABLE = "ESPRESSO_JOB_SECRET"
SIZE = 32
"""Bytes of a challenge, of a proof, and of a secret that rank 0 makes."""

_SHORTEST = 16

_VISIT_S = 5.0
"""A visitor who has not said all by then is put out."""


def given_secret(environment: Mapping[str, str] | None = None) -> Secret | None:
    """What the environment says.

    Raises:
        TopologyError: it is too short to be one.
    """
    text = (os.environ if environment is None else environment).get(VARIABLE)
    if text is not None and len(text) < _SHORTEST:
        raise TopologyError(
            f"{VARIABLE} has {len(text)} characters, expected at least {_SHORTEST}: openssl rand -hex 32"
        )
    return None if text is None else Secret(text.encode())


class Secret:
    """Proves, and checks proofs."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def fresh(cls) -> tuple[Secret, str]:
        """A new one, and its text."""
        text = secrets.token_hex(SIZE)
        return cls(text.encode()), text

    def proof(self, who: str, theirs: bytes, mine: bytes) -> bytes:
        """That ``who`` knows the secret, to whoever sent the challenge ``theirs``."""
        return hmac.digest(self._key, b"\0".join((who.encode(), theirs, mine)), "sha256")

    def proves(self, proof: bytes, who: str, mine: bytes, theirs: bytes) -> bool:
        """Whether ``proof`` is what ``who`` answers to the challenge ``mine``."""
        return hmac.compare_digest(proof, self.proof(who, mine, theirs))

    def seal(self, label: str, data: bytes) -> bytes:
        return hmac.digest(self._key, label.encode() + b"\0" + data, "sha256") + data

    def unseal(self, label: str, sealed: bytes) -> bytes:
        """What was sealed under this label.

        Raises:
            ProtocolError: by somebody with another secret.
        """
        data = sealed[SIZE:]
        if not hmac.compare_digest(sealed[:SIZE], self.seal(label, data)[:SIZE]):
            raise ProtocolError(
                f"it does not know this job's secret: is {VARIABLE} the same on all ranks, and is another job using the"
                " same address and port?"
            )
        return data


# -- before there are connections ------------------------------------------------------------------


class Door:
    """An open port of a process that is to serve, before there are connections: who can reach it, and who may.

    Whoever connects and knows the job's secret learns that this process knows it too; others are put out::

        server                          worker
        32 random bytes          ──>
                                 <──    32 random bytes, proof over both
        proof over both          ──>
    """

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
            until, mine = Deadline(_VISIT_S), secrets.token_bytes(SIZE)
            visitor.sendall(mine)
            said = _read(visitor, 2 * SIZE, until)
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
        until = Deadline(timeout_s)
        with socket.create_connection((address, port), timeout=timeout_s) as visit:
            theirs, mine = _read(visit, SIZE, until), secrets.token_bytes(SIZE)
            visit.sendall(mine + secret.proof("worker", theirs, mine))
            proof = _read(visit, SIZE, until)
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


def _read(visit: socket.socket, num_bytes: int, until: Deadline) -> bytes:
    """So many bytes.

    Raises:
        EOFError: the other side closed.
        TimeoutError: they did not come in time.
    """
    data = b""
    while len(data) < num_bytes:
        visit.settimeout(until.left_s)
        part = visit.recv(num_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return data


# -- on connections --------------------------------------------------------------------------------


def introduce(transport: Transport, peers: Sequence[int], secret: Secret, timeout_s: float) -> None:
    """Prove to all peers that this rank knows the secret, and have them prove it.

    Raises:
        LinkError: names the peer that cannot, or does not answer in time.
    """
    until = Deadline(timeout_s)
    challenge = secrets.token_bytes(SIZE)
    theirs = _swap(transport, Tag.CHALLENGE, dict.fromkeys(peers, challenge), until)
    proofs = {peer: secret.proof(f"{transport.rank} to {peer}", theirs[peer], challenge) for peer in peers}
    for peer, proof in _swap(transport, Tag.PROOF, proofs, until).items():
        if not secret.proves(proof, f"{peer} to {transport.rank}", challenge, theirs[peer]):
            raise LinkError(f"rank {peer} of the connections does not know this job's secret ({VARIABLE})")


def _swap(transport: Transport, tag: Tag, messages: Mapping[int, bytes], until: Deadline) -> dict[int, bytes]:
    """Send each peer its message, and take theirs."""
    received = {peer: np.empty(SIZE, np.uint8) for peer in messages}
    pending: list[Pending] = []
    try:
        for peer, message in messages.items():
            data = np.frombuffer(bytearray(message), np.uint8)
            pending.append(transport.receive(Channel.CONTROL, peer, tag, received[peer]))
            pending.append(transport.send(Channel.CONTROL, peer, tag, data))
        wait_for(pending, until)
    except LinkError as error:
        raise LinkError(
            f"rank {error.peer} of the connections did not prove within {until.seconds:g} s that it knows this job's"
            f" secret ({error}); is it running?"
        ) from error
    return {peer: data.tobytes() for peer, data in received.items()}
