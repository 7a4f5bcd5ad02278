"""Hosts as network namespaces, joined by veth, each card's egress limited by a token bucket.

Two hosts are the two ends of one veth pair; more hosts meet at a bridge in a namespace of its own:

    host 0 [eth0] ===== [eth0] host 1            host i [eth0] ===== [port i] switch

Hosts far apart (:class:`~benchmarks.emulated.wide_area.Distance`) have TUN devices instead, and a router between them.

Nothing is made in the machine's own namespace, so no address here can collide with one outside.
"""

import itertools
import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.emulated.interrupts import interrupts_deferred, termination_raises
from benchmarks.emulated.rate import format_rate, parse_rate
from benchmarks.emulated.wide_area import OFFLOAD_FROM_BPS, Distance, open_device, routed

log = logging.getLogger("espresso.emulated")

#: What a rested card lets through at once: so long at its first rate, and within these.
BURST_MS, MIN_BURST_BYTES, MAX_BURST_BYTES = 1, 16 * 1024, 128 * 1024
#: How long a packet may wait in the token bucket's queue before the queue counts as full.
QUEUE_LATENCY_MS = 50
_PREFIX = "espresso"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-\d+-(?:host\d+|switch)")
_COUNTER = itertools.count()


@dataclass(frozen=True)
class Host:
    """One emulated host. On loopback, where all hosts are this machine, ``namespace`` and ``rate_bps`` are None."""

    index: int
    namespace: str | None
    address: str
    interface: str
    rate_bps: int | None = None

    def command(self, argv: list[str]) -> list[str]:
        """``argv`` as a command that runs on this host (under the same pid: nothing is forked between)."""
        return argv if self.namespace is None else ["ip", "netns", "exec", self.namespace, *argv]

    def tx_bytes(self) -> int:
        """Bytes that this host's card has sent since it was made."""
        path = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        if self.namespace is None:
            return int(Path(path).read_text())
        return int(_run(*self.command(["cat", path])))

    def set_up(self, up: bool) -> None:
        """Take this host's card down, or up again; on loopback there is none to take.

        Raises:
            ValueError: the host is this machine itself.
        """
        if self.namespace is None:
            raise ValueError("a host on loopback has no card of its own")
        _run("ip", "-n", self.namespace, "link", "set", self.interface, "up" if up else "down")


class _State:
    """What of a network may change while it runs."""

    def __init__(self, rates_bps: list[int], distance: Distance | None, apply: Callable[[], None]) -> None:
        self.rates_bps, self.distance, self.apply = rates_bps, distance, apply


@dataclass(frozen=True)
class Network:
    """Hosts and the limit between them. On loopback ``rate_bps`` is None and ``why_unlimited`` says why.

    ``rate_bps`` is that of all hosts which were given no rate of their own, as they were made.
    """

    hosts: tuple[Host, ...]
    rate_bps: int | None
    why_unlimited: str | None = None
    _state: _State | None = field(default=None, repr=False)

    @property
    def distance(self) -> Distance | None:
        """What lies between hosts far apart at this moment; None for hosts on one local network."""
        return None if self._state is None else self._state.distance

    def change(
        self,
        *,
        rate: str | None = None,
        host: int | None = None,
        rtt_ms: float | None = None,
        jitter_ms: float | None = None,
        loss: float | None = None,
    ) -> None:
        """Change the network under running workers; what is not named stays.

        Args:
            rate: each host's egress limit, or that of ``host`` alone.
            rtt_ms, jitter_ms, loss: of a wide area, as in :class:`Distance`.

        Raises:
            ValueError: on loopback; delay or loss on a local network; a value out of range.
        """
        state = self._state
        if state is None:
            raise ValueError(f"this network cannot change: {self.why_unlimited}")
        given: dict[str, Any] = {"rtt_ms": rtt_ms, "jitter_ms": jitter_ms, "loss": loss}
        far = {name: value for name, value in given.items() if value is not None}
        if far and state.distance is None:
            raise ValueError(
                f"{', '.join(far)}: only hosts that are far apart have these; pass distance to open_network"
            )
        if state.distance is not None:
            state.distance = replace(state.distance, **far)
        if rate is not None:
            for index in range(len(self.hosts)) if host is None else [host]:
                state.rates_bps[index] = parse_rate(rate)
        state.apply()


class CommandError(RuntimeError):
    """A command of the system failed."""


def _run(*argv: str) -> str:
    # A session of its own: Ctrl-C in a terminal would otherwise end the very commands that clean up after it.
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False, start_new_session=True)
    if done.returncode != 0:
        raise CommandError(f"{' '.join(argv)}: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return done.stdout


def why_not_permitted() -> str | None:
    """Why this process can make no limited namespaces, or None if it can (found out by making one)."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool!r} is missing (it comes with iproute2)"
    probe = f"{_PREFIX}-{os.getpid()}-{next(_COUNTER)}-host0"
    try:
        with _owned(probe.removesuffix("-host0")):
            _run("ip", "netns", "add", probe)
            _add_veth(probe, "eth0", probe, "eth1")
            _limit(probe, "eth0", 10**9, MAX_BURST_BYTES)
    except CommandError as error:
        return str(error)
    return None


@contextmanager
def open_network(
    num_hosts: int,
    rate: str = "1gbit",
    rates: Mapping[int, str] | None = None,
    distance: Distance | None = None,
) -> Iterator[Network]:
    """Make the network, and remove it however the block is left (SIGINT and SIGTERM included).

    Args:
        num_hosts: at least one.
        rate: each host's egress limit, such as ``1gbit``.
        rates: another rate for some hosts, by index.
        distance: what lies between the hosts; None for one local network.

    Raises:
        ValueError: an argument is out of range.
        CommandError: namespaces are permitted here, and yet the network could not be made.
    """
    rate_bps = parse_rate(rate)
    others = {index: parse_rate(text) for index, text in (rates or {}).items()}
    if num_hosts < 1 or num_hosts > 250:
        raise ValueError(f"num_hosts is {num_hosts}; it must lie between 1 and 250")
    refusal = why_not_permitted()
    if refusal is not None:
        log.warning("no network namespaces here (%s): running on loopback without a limit", refusal)
        yield Network(tuple(Host(i, None, "127.0.0.1", "lo") for i in range(num_hosts)), None, refusal)
        return
    remove_leftovers()
    prefix = f"{_PREFIX}-{os.getpid()}-{next(_COUNTER)}"
    limits = [others.get(index, rate_bps) for index in range(num_hosts)]
    hosts = tuple(Host(i, f"{prefix}-host{i}", f"10.231.0.{i + 1}", "eth0", limits[i]) for i in range(num_hosts))
    with _owned(prefix):
        for host in hosts:
            _run("ip", "netns", "add", str(host.namespace))
        if distance is None:
            _connect(hosts, f"{prefix}-switch")
            # Also where rates change: connections that are open make packets as long as they did, and longer ones than
            # a bucket are lost.
            bursts = [min(max(bps * BURST_MS // 8000, MIN_BURST_BYTES), MAX_BURST_BYTES) for bps in limits]
            for host, burst_bytes in zip(hosts, bursts, strict=True):
                _shorten(str(host.namespace), host.interface, burst_bytes)

            def limit() -> None:
                for host, bps, burst_bytes in zip(hosts, limits, bursts, strict=True):
                    _limit(str(host.namespace), host.interface, bps, burst_bytes)

            limit()
            log.info("%d hosts, each limited to %s", num_hosts, format_rate(rate_bps))
            yield Network(hosts, rate_bps, None, _State(limits, None, limit))
            return
        offload = max(limits) >= OFFLOAD_FROM_BPS
        devices = [open_device(str(host.namespace), host.interface, offload=offload) for host in hosts]
        with routed(devices, offload=offload) as change:
            state = _State(limits, distance, lambda: change(_settings(state)))
            state.apply()
            _bring_up(hosts, distance)
            log.info("%d hosts, each limited to %s, %g ms apart", num_hosts, format_rate(rate_bps), distance.rtt_ms)
            yield Network(hosts, rate_bps, None, state)


def _settings(state: _State) -> dict[str, object]:
    assert state.distance is not None
    return {"rate_bps": state.rates_bps, **state.distance.settings()}


def _connect(hosts: tuple[Host, ...], switch: str) -> None:
    """Make cards, join them, give them addresses and bring them up."""
    if len(hosts) == 2:
        ends = [(str(host.namespace), host.interface) for host in hosts]
        _add_veth(*ends[0], *ends[1])
    else:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for host in hosts:
            port = f"port{host.index}"
            _add_veth(str(host.namespace), host.interface, switch, port)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
    _bring_up(hosts, None)


def _bring_up(hosts: tuple[Host, ...], distance: Distance | None) -> None:
    for host in hosts:
        ip = ("ip", "-n", str(host.namespace))
        # Without an IPv6 address of its own the card sends nothing that a worker did not send.
        _run(*ip, "link", "set", host.interface, "addrgenmode", "none")
        _run(*ip, "addr", "add", f"{host.address}/24", "dev", host.interface)
        if distance is not None:
            _run(*ip, "link", "set", host.interface, "mtu", str(distance.mtu), "txqueuelen", "2000")
        _run(*ip, "link", "set", host.interface, "up")
        _run(*ip, "link", "set", "lo", "up")
        if distance is not None:  # for the route: setting it for the namespace is not permitted everywhere
            network = f"{host.address.rpartition('.')[0]}.0/24"
            _run(*ip, "route", "change", network, "dev", host.interface, "congctl", distance.congestion)


def _add_veth(namespace: str, name: str, peer_namespace: str, peer_name: str) -> None:
    end, peer = ("netns", namespace), ("name", peer_name, "netns", peer_namespace)
    _run("ip", "link", "add", name, *end, "type", "veth", "peer", *peer)


def _shorten(namespace: str, interface: str, burst_bytes: int) -> None:
    """Have no packet longer than the bucket: the kernel cuts those up, at half a core's cost for 400 Mb/s."""
    with suppress(CommandError):
        _run("ip", "-n", namespace, "link", "set", interface, "gso_max_size", str(min(burst_bytes * 9 // 10, 65536)))


def _limit(namespace: str, interface: str, rate_bps: int, burst_bytes: int) -> None:
    bucket = ("tbf", "rate", f"{rate_bps}bit", "burst", f"{burst_bytes}b", "latency", f"{QUEUE_LATENCY_MS}ms")
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *bucket)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _remove(names: list[str]) -> None:
    for name in names:
        try:
            _run("ip", "netns", "delete", name)
        except CommandError as error:
            log.warning("could not remove a namespace: %s", error)


@contextmanager
def _owned(prefix: str) -> Iterator[None]:
    """Remove the namespaces whose names start with ``prefix`` when the block is left, whatever ends it."""
    with termination_raises():
        try:
            yield
        finally:
            with interrupts_deferred():
                _remove([name for name in _namespaces() if name.startswith(f"{prefix}-")])


def remove_leftovers() -> list[str]:
    """Remove namespaces of ours whose owner is gone (it was killed outright), with the processes in them.

    Returns:
        The names removed.
    """
    stale = []
    for name in _namespaces():
        match = _NAME.fullmatch(name)
        if match is not None and not Path(f"/proc/{match[1]}").exists():
            for pid in _run("ip", "netns", "pids", name).split():
                os.kill(int(pid), signal.SIGKILL)
            stale.append(name)
    _remove(stale)
    return stale
