"""What workers and servers say to each other: headers, keys, tables.

Every message on the control channel begins with a header of 56 bytes, little-endian::

     0  4s  magic "ESPS"
     4  B   version
     5  B   operation (Op)
     6  H   flags (Flag)
     8  I   key; of a close, the state; of a question, the tag of its answer
    12  i   sender's rank among workers and servers
    16  q   step: the iteration
    24  Q   bytes that follow: of the data message for a push, of the body otherwise
    32  d   scale: multiplies the decoded sum where the server decodes last
    40  qq  reserved, 0

A push is such a header on the control channel and its payload on the data channel, under the key's tag, which its
server gave it. The answer to a push is the reply on the data channel under the same tag: its size is known to both
sides from the key's table entry. A close says that its sender has left a state: it is the last message about it. That a
worker lives it says every hour. Neither has a body or an answer. All other operations are questions: they carry a body
(:mod:`espresso.comm.messages`), in pieces of 16 MiB, and are answered by a header and a body, under a tag that no other
question of the worker has. Answers come in any order: that to a table of keys waits for other workers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt

from espresso.comm.errors import EspressoError, ProtocolError
from espresso.comm.messages import MAX_BYTES, Bytes, Messages
from espresso.comm.parameter_server.transport import Channel, Deadline, Pending, Transport, cut, wait_for_each
from espresso.strategies import DTYPES, CompressorSpec

MAGIC, VERSION = b"ESPS", 7
_HEADER = struct.Struct("<4sBBHIiqQdqq")
HEADER_BYTES = _HEADER.size
PIECE_BYTES = 16 << 20
"""Of a body: each that comes says that the other side lives, and a thin card needs no time-out of its own."""


class Op(IntEnum):
    """What a control message is about."""

    PUSH = 1
    INSTALL = 2
    PLACE = 3
    FETCH = 4
    RESET = 5
    PREPARE = 6
    MEASURE = 7
    LEAVE = 8
    ANSWER = 9
    REFUSAL = 10
    NOTICE = 11
    RESCALE = 12
    WORKING = 13
    CLOSE = 14
    LIVES = 15


class Flag(IntFlag):
    """``RAW``: plain numbers instead of a payload, which would be larger. ``KEPT``: the key's last round counts."""

    NONE = 0
    RAW = 1
    KEPT = 2


class Tag(IntEnum):
    """Message tags, a body's after its header's.

    ``FIRST`` to ``LAST``, the highest every MPI has, are those of keys on the data channel, of answers on the control
    channel.
    """

    HEADER = 1
    BODY = 2
    NOTICE = 5
    NOTICE_BODY = 6
    CHALLENGE = 7
    PROOF = 8
    FIRST = 16
    LAST = 32767


NAMESPACE_SHIFT = 16
"""Key numbers have 32 bits: the state above this bit, its key below."""


def key_numbers(namespace: int) -> range:
    """The numbers of a state's keys.

    Raises:
        EspressoError: there are not so many states.
    """
    most = 1 << NAMESPACE_SHIFT
    if namespace >= most:
        raise EspressoError(f"state number {namespace} of the servers' {most}: make fewer states in one launch")
    return range(namespace * most, (namespace + 1) * most)


@dataclass(frozen=True, slots=True)
class Header:
    op: Op
    sender: int
    key: int = 0
    flags: Flag = Flag.NONE
    step: int = 0
    num_bytes: int = 0
    scale: float = 1.0

    def pack(self) -> Bytes:
        packed = _HEADER.pack(
            MAGIC, VERSION, self.op, self.flags, self.key, self.sender, self.step, self.num_bytes,
            self.scale, 0, 0,
        )  # fmt: skip
        return np.frombuffer(bytearray(packed), np.uint8)

    @classmethod
    def unpack(cls, data: Bytes) -> Header:
        """Read a header.

        Raises:
            ProtocolError: another magic number, version or operation, or too large a body.
        """
        magic, version, op, flags, key, sender, step, size, scale, *_ = _HEADER.unpack(data.tobytes())
        if magic != MAGIC or version != VERSION:
            raise ProtocolError(
                f"a parameter-server message begins with {magic!r}, version {version}; expected {MAGIC!r}, version"
                f" {VERSION}: do all machines run the same espresso?"
            )
        try:
            header = cls(Op(op), sender, key, Flag(flags), step, size, scale)
        except ValueError:
            raise ProtocolError(f"unknown parameter-server operation {op} from rank {sender}") from None
        if size > MAX_BYTES and header.op is not Op.PUSH:  # the size of a push is known from its key
            raise ProtocolError(f"rank {sender} announced {size} bytes for '{header.op.name.lower()}'")
        return header


@dataclass(frozen=True, slots=True)
class Stretch:
    """``numel`` elements of a tensor from ``start``."""

    tensor: str
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Key:
    """One region of one partition at one server: what a push, its sum and its pull are about.

    Attributes:
        number: unique in the job.
        server: index of the server that holds it.
        workers: ranks that push it, in the order in which they are added up.
        stretches: what it holds, in order.
        dtype: of the numbers: that of the gradient where nothing is compressed, else float32 or float64.
        compressor: of the payloads.
        coded: whether ranks compress at all (perhaps with ``none``), so that numbers are sums and not averages.
        two_way: whether the server compresses the sum.
        keeps_residual: whether it does so with error feedback.
        is_plain: whether numbers are pushed and not payloads, which would be larger or are none.
        up_bytes, down_bytes: sizes of what is pushed and what is pulled.
        site: number of the worker's compression site, for random draws.
        seed: for random draws.
        gain: the part of what the server did not send that its next round adds, where the table has none.
    """

    number: int
    server: int
    workers: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    dtype: str
    compressor: CompressorSpec
    coded: bool
    two_way: bool
    keeps_residual: bool
    is_plain: bool
    up_bytes: int
    down_bytes: int
    site: int
    seed: int
    gain: float = 1.0

    @property
    def namespace(self) -> int:
        """The state that it belongs to."""
        return self.number >> NAMESPACE_SHIFT

    @property
    def numel(self) -> int:
        return sum(stretch.numel for stretch in self.stretches)

    @property
    def load_bytes(self) -> int:
        """What it costs its server's network card."""
        return len(self.workers) * (self.up_bytes + self.down_bytes)

    @property
    def raw_bytes(self) -> int:
        """What it costs its server's processor: the numbers of all workers, uncompressed."""
        return len(self.workers) * self.numel * DTYPES[self.dtype]

    def __str__(self) -> str:
        first = self.stretches[0]
        more = f" and {len(self.stretches) - 1} more" if len(self.stretches) > 1 else ""
        return f"key {self.number} ({first.tensor}[{first.start}:{first.start + first.numel}]{more})"


@dataclass(frozen=True)
class Table:
    """The keys of one plan, or of one bucket of it; replaces earlier keys of the same tensors.

    Attributes:
        namespace: one per state, so that several models can train side by side.
        workers: ranks that take part.
        keys: of all servers.
        numels: elements of every tensor, for residuals that find no place.
        only: the tensors whose earlier keys it replaces; None: all of the namespace.
        strategy: digest of the strategy; equal on all workers, or the table is refused.
        transactional: residuals keep the state before the last round until it is known to count.
        gain: the part of what was not sent that the next round adds; None leaves it to each compressor.
        discarded: steps that did not count (a non-finite gradient somewhere).
        timeout_s: how long a worker waits for an answer.
    """

    namespace: int
    workers: tuple[int, ...]
    keys: tuple[Key, ...]
    numels: dict[str, int]
    only: frozenset[str] | None
    strategy: str
    transactional: bool
    gain: float | None
    discarded: frozenset[int]
    timeout_s: float


@dataclass(frozen=True)
class Held:
    """Residual values of a stretch of a tensor, as they travel."""

    tensor: str
    start: int
    values: npt.NDArray[Any]


@dataclass(frozen=True)
class Installed:
    """What a server answers to a table.

    Attributes:
        orphans: residuals that the new table has no place for at this server; to the first worker only.
        tags: under which the data of this server's keys goes, by key number.
    """

    orphans: tuple[Held, ...]
    tags: dict[int, int]


BODIES = Messages(Table, Key, Stretch, Held, Installed, CompressorSpec)
"""How bodies are written and read."""


def say(transport: Transport, peer: int, tag: int, op: Op, body: Any, key: int = 0) -> list[Pending]:
    """Start to send a header and a body: under ``tag`` and the one after it."""
    data = BODIES.pack(body)
    header = Header(op, transport.rank, key, num_bytes=data.nbytes).pack()
    parts = [(tag, header), *((tag + 1, piece) for piece in cut(data, PIECE_BYTES))]
    return [transport.send(Channel.CONTROL, peer, under, part) for under, part in parts]


def hear(transport: Transport, peer: int, tag: int, until: Deadline | None) -> Header:
    """A header, which renews the time; without ``until`` there is no limit to the wait.

    Raises:
        LinkError, ProtocolError: it did not come, or is malformed.
    """
    data = np.empty(HEADER_BYTES, np.uint8)
    wait_for_each([transport.receive(Channel.CONTROL, peer, tag, data)], until)
    return Header.unpack(data)


class Body:
    """What a header announced under ``tag``, on its way."""

    def __init__(self, transport: Transport, peer: int, tag: int, header: Header) -> None:
        self._data = np.empty(header.num_bytes, np.uint8)
        pieces = cut(self._data, PIECE_BYTES)
        self._pieces = [transport.receive(Channel.CONTROL, peer, tag + 1, piece) for piece in pieces]

    def read(self, until: Deadline | None) -> Any:
        """The value, once it is there; every piece renews the time.

        Raises:
            LinkError, ProtocolError: it did not come, or is malformed.
        """
        wait_for_each(self._pieces, until)
        return BODIES.unpack(self._data)
