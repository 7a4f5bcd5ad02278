"""Hosts far apart: a TUN device in each host's namespace, and one router process between them."""

import ctypes
import fcntl
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_ROUTER = str(Path(__file__).with_name("router.py"))
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x400454CA, 0x0001, 0x1000, 0x4000
_TUNSETOFFLOAD, _TUN_F_CSUM, _TUN_F_TSO4 = 0x400454D0, 1, 2
OFFLOAD_FROM_BPS = 400_000_000
"""From this rate on a card hands over up to 64 KB of one connection at a time, as cards of that speed do, and a loss
takes all of it: a router in user space does not keep up with single packets."""
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Distance:
    """What lies between any two hosts.

    Attributes:
        rtt_ms: round trip without load; half of it each way.
        jitter_ms: up to this much more each way, at random; packets of one sender stay in order.
        loss: probability that a packet is lost.
        queue_ms: how long a packet may wait for its sender's rate before it is dropped.
        congestion: TCP's congestion control on the way; a kernel's default may be BBR, which flatters.
        mtu: of the cards; a large one keeps a router in user space cheap.
    """

    rtt_ms: float = 50.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    queue_ms: float = 50.0
    congestion: str = "cubic"
    mtu: int = 9000

    def __post_init__(self) -> None:
        for name in ("rtt_ms", "jitter_ms", "queue_ms"):
            if not 0 <= getattr(self, name) <= 10_000:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie between 0 and 10000")
        if not 0 <= self.loss < 1:
            raise ValueError(f"loss is {self.loss}; it must be at least 0 and below 1")
        if not 1280 <= self.mtu <= 65_000:
            raise ValueError(f"mtu is {self.mtu}; it must lie between 1280 and 65000")

    def settings(self) -> dict[str, float]:
        """As the router takes them."""
        return {
            "delay_s": self.rtt_ms / 2e3,
            "jitter_s": self.jitter_ms / 1e3,
            "loss": self.loss,
            "queue_s": self.queue_ms / 1e3,
        }


def _inside(namespace: str, make: Callable[[], int]) -> int:
    """What ``make`` returns on a thread that has entered the namespace; the thread ends with it."""
    found: list[int | OSError] = []

    def enter() -> None:
        try:
            descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
            try:
                if _LIBC.setns(descriptor, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
            finally:
                os.close(descriptor)
            found.append(make())
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if isinstance(found[0], OSError):
        raise found[0]
    return found[0]


def open_device(namespace: str, name: str, *, offload: bool) -> int:
    """Make a TUN device in a namespace; it lives as long as its descriptor.

    Args:
        offload: packets carry the header in which the kernel leaves segmentation and checksums to the card.

    Raises:
        OSError: there is no ``/dev/net/tun``, or it may not be used.
    """

    def make() -> int:
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        try:
            flags = _IFF_TUN | _IFF_NO_PI | (_IFF_VNET_HDR if offload else 0)
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
            if offload:
                fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    return _inside(namespace, make)


@contextmanager
def routed(descriptors: list[int], *, offload: bool) -> Iterator[Callable[[dict[str, object]], None]]:
    """Route between these devices; yields the function that changes the router's settings, and closes the devices."""
    argv = [sys.executable, "-S", "-E", _ROUTER, str(10 if offload else 0), *map(str, descriptors)]
    try:
        # A session of its own: Ctrl-C must not end the network under workers that are being stopped.
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=descriptors, start_new_session=True
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)

    def change(settings: dict[str, object]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
        if process.stdout.readline() != b"\n":
            raise OSError("the router between the hosts has ended")

    try:
        yield change
    finally:
        process.stdin.close()  # type: ignore[union-attr]  # a pipe, as asked for
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()  # type: ignore[union-attr]
