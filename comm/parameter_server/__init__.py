"""The parameter server: servers that add up compressed gradients and answer compressed.

A room of comm, not beside it: its messages, residuals and errors are comm's, and the steps of a partition, above, push
and pull through it. It is one more way to exchange, and knows nothing of partitions, plans and DDP.

Workers and servers are ranks of one launch (``python -m espresso.launch``); DDP sees the workers only. The leaves
of the decision tree that go through servers are carried out by :class:`Link`, one per state.

May import: comm.keep.
"""

from espresso.comm.parameter_server.client import Client, Line
from espresso.comm.parameter_server.link import Link
from espresso.comm.parameter_server.places import Bearing

_client: Client | None = None


def connected() -> Client | None:
    """This process's client, if it was started with servers."""
    return _client


def connect(client: Client | None) -> None:
    """Make ``client`` this process's (the launcher does it)."""
    global _client
    _client = client


__all__ = ["Bearing", "Client", "Line", "Link", "connect", "connected"]
