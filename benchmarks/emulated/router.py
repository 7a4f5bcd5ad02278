"""A router in user space between hosts far apart: delay, jitter, loss, a finite queue and a rate for each sender.

``network`` starts it as a file, with no imports of ours. It takes one TUN device of each host as an open descriptor:

    router.py HEADER FD FD ...     HEADER: bytes before each packet. Settings come as JSON lines; it ends with stdin

A packet waits for its sender's rate, then for the delay; packets of one sender never overtake each other. The queue of
a sender that is full drops what comes (drop-tail). netem, which does this in the kernel, is missing in many kernels.
"""

import contextlib
import heapq
import json
import os
import random
import select
import sys
import time

SMALLEST_QUEUE_BYTES = 64 * 1024
BURST = 64
"""Packets read from one host before the others and what is due are looked at."""
LONGEST_WAIT_S = 0.05


class Router:
    """Packets on their way.

    Args:
        descriptors: a non-blocking TUN device of every host; host i has an address that ends in i + 1.
        header: bytes before each packet, passed on as they are.
    """

    def __init__(self, descriptors: list[int], header: int) -> None:
        self.descriptors = descriptors
        self._first, self._target = header, header + 19
        self.rate_bps = [1e9] * len(descriptors)
        self.delay_s = self.jitter_s = self.loss = 0.0
        self.queue_s = 0.05
        self._sent_at = [0.0] * len(descriptors)
        self._last_at = [0.0] * len(descriptors)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count = 0
        self._random = random.Random(0)

    def change(self, settings: dict[str, float | list[float]]) -> None:
        """Take new settings; what is under way keeps its time."""
        for name, value in settings.items():
            setattr(self, name, value)

    def wait_s(self) -> float:
        """How long there is nothing to do if no packet comes."""
        if not self._under_way:
            return LONGEST_WAIT_S
        return max(0.0, min(LONGEST_WAIT_S, self._under_way[0][0] - time.monotonic()))

    def take(self, host: int) -> None:
        """Read what a host sends."""
        for _ in range(BURST):
            try:
                packet = os.read(self.descriptors[host], 70_000)
            except OSError:  # nothing more, or the device is down
                return
            is_ipv4 = len(packet) > self._target and packet[self._first] >> 4 == 4
            target = packet[self._target] - 1 if is_ipv4 else -1
            if not 0 <= target < len(self.descriptors):
                continue
            now, rate = time.monotonic(), self.rate_bps[host]
            start = max(now, self._sent_at[host])
            queued_bytes = (start - now) * rate / 8
            if queued_bytes > max(SMALLEST_QUEUE_BYTES, rate / 8 * self.queue_s) or self._random.random() < self.loss:
                continue
            self._sent_at[host] = start + 8 * len(packet) / rate
            at = self._sent_at[host] + self.delay_s + self._random.random() * self.jitter_s
            at = self._last_at[host] = max(at, self._last_at[host])
            self._count += 1
            heapq.heappush(self._under_way, (at, self._count, target, packet))

    def deliver(self) -> None:
        """Write what is due."""
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._under_way)
            try:
                os.write(self.descriptors[target], packet)
            except OSError:
                continue  # the device is full or down: the packet is lost


def main() -> None:
    """Route until stdin ends; ahead of other programs where that is permitted, as hardware would be."""
    with contextlib.suppress(PermissionError):
        os.nice(-15)
    router = Router([int(text) for text in sys.argv[2:]], int(sys.argv[1]))
    host_of = {descriptor: host for host, descriptor in enumerate(router.descriptors)}
    poll = select.epoll()
    for descriptor in (*router.descriptors, sys.stdin.fileno()):
        poll.register(descriptor, select.EPOLLIN)
    pending = b""
    while True:
        for descriptor, _ in poll.poll(router.wait_s()):
            if descriptor in host_of:
                router.take(host_of[descriptor])
                continue
            more = os.read(sys.stdin.fileno(), 65536)
            if not more:
                return
            *lines, pending = (pending + more).split(b"\n")
            for line in lines:
                router.change(json.loads(line))
                sys.stdout.write("\n")
                sys.stdout.flush()
        router.deliver()


if __name__ == "__main__":
    main()
