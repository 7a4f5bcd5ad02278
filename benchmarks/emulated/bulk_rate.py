"""Check in the same run that the network has the rate that it was asked for."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.emulated.network import Host, Network
from benchmarks.emulated.rate import format_rate

_PEER = str(Path(__file__).with_name("bulk_peer.py"))
#: Payload against limit. Headers take 4 % at an MTU of 1500; a lower ratio means that the machine is busy.
_LOWEST_RATIO, _HIGHEST_RATIO = 0.85, 1.02
#: Then it is measured again, so often in all: the highest counts, for nothing makes a limit let more through.
_TRIES = 3


@dataclass(frozen=True)
class BulkRate:
    """What one TCP connection carried from one host to the next."""

    sender: int
    receiver: int
    payload_bps: float
    limit_bps: int | None

    @property
    def ratio(self) -> float | None:
        """Payload rate over the limit, or None without a limit."""
        return None if self.limit_bps is None else self.payload_bps / self.limit_bps

    @property
    def is_limited(self) -> bool:
        """The limit holds: no more than it gets through."""
        return self.ratio is not None and self.ratio <= _HIGHEST_RATIO

    @property
    def is_verified(self) -> bool:
        """The limit holds and is reached."""
        return self.ratio is not None and _LOWEST_RATIO <= self.ratio <= _HIGHEST_RATIO


def measure_bulk_rate(network: Network, duration_s: float | None = None) -> tuple[BulkRate, ...]:
    """The rate from each host to the next one, one after the other.

    ``duration_s`` each: .9 s, and where hosts are far apart 60 round trips more, in which a connection finds its rate.
    """
    if duration_s is None:
        duration_s = 0.9 if network.distance is None else 0.9 + 0.06 * network.distance.rtt_ms
    hosts = network.hosts
    if len(hosts) < 2:
        return ()
    pairs = [(host, hosts[(host.index + 1) % len(hosts)]) for host in hosts]
    trip_s = 0.0 if network.distance is None else (network.distance.rtt_ms + network.distance.queue_ms) / 1e3
    return tuple(_measure(a, b, duration_s, round(trip_s * (a.rate_bps or 0) / 2)) for a, b in pairs)


def measure_round_trip(network: Network, times: int = 20) -> float:
    """The shortest of some round trips of a small datagram between the first two hosts, in milliseconds."""
    first, second = network.hosts[:2]
    argv = second.command([sys.executable, _PEER, "echo"])
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            ask = first.command([sys.executable, _PEER, "ask", second.address, port, str(times)])
            asked = subprocess.run(ask, check=True, capture_output=True, text=True, timeout=times + 30)
        finally:
            process.kill()
    return float(asked.stdout) * 1e3


def describe(network: Network) -> str:
    """The network in words, its bulk rate measured now."""
    if network.rate_bps is None:
        return f"loopback without a limit ({network.why_unlimited})"
    rates = measure_bulk_rate(network)
    verdict = "verified" if all(rate.is_verified for rate in rates) else "NOT as asked"
    bulk = ", ".join(format_rate(rate.payload_bps) for rate in rates)
    limits = dict.fromkeys(format_rate(host.rate_bps or 0) for host in network.hosts)
    far = "" if network.distance is None else f", round trip {measure_round_trip(network):.0f} ms"
    return f"{', '.join(limits)} (bulk TCP {bulk}: {verdict}{far})"


def _measure(sender: Host, receiver: Host, duration_s: float, window: int) -> BulkRate:
    best = BulkRate(sender.index, receiver.index, 0.0, sender.rate_bps)
    for _ in range(_TRIES):
        payload_bps = max(best.payload_bps, _transfer(sender, receiver, duration_s, window))
        best = replace(best, payload_bps=payload_bps)
        if best.ratio is None or best.ratio >= _LOWEST_RATIO:
            break
    return best


def _transfer(sender: Host, receiver: Host, duration_s: float, window: int) -> float:
    receive = receiver.command([sys.executable, _PEER, "receive", str(duration_s), str(window)])
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            send = sender.command([sys.executable, _PEER, "send", receiver.address, port, str(duration_s), str(window)])
            subprocess.run(send, check=True, timeout=duration_s + 30)
            counted = json.loads(process.stdout.readline())
        finally:
            process.kill()
    return 8 * float(counted["bytes"]) / float(counted["seconds"])
