"""Several hosts on one machine, joined by a network of a known rate.

    with open_network(num_hosts=2, rate="1gbit") as network:
        measure_bulk_rate(network)
        run_workers(network, [sys.executable, "train.py"], workers_per_host=1, pin=True, deadline_s=300)

Each host is a network namespace, each network card a veth whose egress the kernel limits with ``tc … tbf``. Hosts far
apart (``distance=Distance(rtt_ms=50)``) are joined by a router in user space. ``network.change(rate="100mbit")``
changes either under running workers.
Where namespaces are not permitted, the same calls run on loopback without a limit, and say so.
"""

from benchmarks.emulated.bulk_rate import BulkRate, describe, measure_bulk_rate, measure_round_trip
from benchmarks.emulated.launch import DeadlineError, WorkerError, run_workers
from benchmarks.emulated.network import Host, Network, open_network, remove_leftovers, why_not_permitted
from benchmarks.emulated.rate import format_rate, parse_rate
from benchmarks.emulated.wide_area import Distance

__all__ = [
    "BulkRate",
    "DeadlineError",
    "Distance",
    "Host",
    "Network",
    "WorkerError",
    "describe",
    "format_rate",
    "measure_bulk_rate",
    "measure_round_trip",
    "open_network",
    "parse_rate",
    "remove_leftovers",
    "run_workers",
    "why_not_permitted",
]
