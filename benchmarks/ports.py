"""A port for a store that is about to start."""

import random
import socket
from contextlib import suppress

PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to connections: Gloo's, which are many, would take one between choice and use."""


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
