"""Connections are left as they are, but those between hosts far apart whose bursts are lost on the way."""

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.emulated import Distance, open_network, run_workers, why_not_permitted
from espresso.comm import connections

REFUSAL = why_not_permitted()

BURSTS = """
import json, time
import torch
import torch.distributed as dist
from espresso.comm import connections, upkeep
from espresso.comm.groups import Groups
from espresso.strategies import Scope

def limits():
    found = [info for *_, info in connections._to_other_hosts()]
    return sorted(info.limit for info in found if info.window * info.mss > connections.WIDE_BYTES and info.resent)

dist.init_process_group("gloo")
upkeep.EVERY_S = 1e6
groups = Groups(timeout_s=60)
tally = connections.Tally(groups.hosts)
member, numbers = groups.scopes[Scope.FLAT], torch.zeros(1_500_000)
for step in range(10):
    groups.barrier()
    time.sleep(0.02)
    dist.all_reduce(numbers, group=member.connection(0).group)
before = limits()
connections.spread_bursts(groups._link_ends)
print(json.dumps([before, limits(), tally.sent().num_bytes]))
groups.barrier()
groups.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(REFUSAL is not None, reason=f"no network namespaces: {REFUSAL}")
def test_bursts_that_are_lost_far_away_are_spread(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[1])
    with open_network(2, "200mbit", distance=Distance(rtt_ms=50, queue_ms=20)) as network:
        argv = [sys.executable, "-c", BURSTS]
        run_workers(network, argv, log_dir=tmp_path, deadline_s=90, env={"PYTHONPATH": root + os.pathsep})
    before, after, num_bytes = json.loads((tmp_path / "rank0.log").read_text().splitlines()[-1])
    assert num_bytes > 9 * 6_000_000
    assert before == [connections._UNLIMITED]
    assert after == [connections._PACED]


Pair = tuple[socket.socket, socket.socket]


RANK, ELSEWHERE = "127.0.0.2", "127.0.0.4"


@contextmanager
def connected(theirs: str, mine: str = "127.0.0.3") -> Iterator[Pair]:
    """Two ends of a connection between two addresses."""
    with socket.socket() as listener, socket.socket() as here:
        listener.bind((theirs, 0))
        listener.listen()
        here.bind((mine, 0))
        here.connect(listener.getsockname())
        there, _ = listener.accept()
        with there:
            yield here, there


def send(pair: Pair, num_bytes: int = 40_000) -> None:
    mine, theirs = pair
    mine.sendall(bytes(num_bytes))
    assert len(theirs.recv(num_bytes, socket.MSG_WAITALL)) == num_bytes


@pytest.fixture
def pair() -> Iterator[Pair]:
    """With a rank of the job."""
    if sys.platform != "linux":
        pytest.skip("only Linux tells what connections do")
    with connected(RANK) as found:
        yield found


def test_the_kernel_tells_what_was_sent_to_hosts_of_the_job(pair: Pair) -> None:
    tally = connections.Tally({RANK})
    before = tally.sent()
    send(pair)
    after = tally.sent()
    assert pair[0].gettimeout() is None
    assert before is not None
    assert after is not None
    assert after.num_bytes - before.num_bytes >= 40_000
    assert after.rtt_us > 0


def test_what_goes_elsewhere_is_not_the_jobs(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a checkpoint does, to a store that is far away."""
    tally = connections.Tally({RANK})
    before = tally.sent()
    with connected(ELSEWHERE) as upload:
        send(upload)
        assert tally.sent() == before
        assert connections.Tally({"10.1.2.3"}).sent() is None
        near, far = ({name: [port]} for name, port in (pair[0].getsockname(), upload[0].getsockname()))
        rows = [
            (*row, info._replace(rtt_us=9000 if row[2] == ELSEWHERE else 50))
            for *row, info in connections._to_other_hosts()
        ]
        monkeypatch.setattr(connections, "_to_other_hosts", lambda: iter(rows))
        assert connections.is_far(far)
        assert not connections.is_far(near)
        assert not connections.is_far({})


def test_what_a_connection_sent_that_was_closed_still_counts(pair: Pair) -> None:
    tally = connections.Tally({RANK})
    with connected(RANK) as other:
        send(other)
        before = tally.sent()
    send(pair, 10_000)
    after = tally.sent()
    assert before is not None
    assert after is not None
    assert after.num_bytes > before.num_bytes
    assert after.busy_us >= before.busy_us


def test_what_is_near_or_belongs_to_others_stays_as_it_is(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = pair
    ends = {name: [number] for name, number in (mine.getsockname(), theirs.getsockname())}
    assert connections.spread_bursts(ends) == 0
    far = [(*row, info._replace(rtt_us=9000, window=99)) for *row, info in connections._to_other_hosts()]
    assert len(far) == 2
    monkeypatch.setattr(connections, "_to_other_hosts", lambda: iter(far))
    assert connections.spread_bursts(ends) == 0  # nothing was lost
    far = [(mine, end, peer, info._replace(resent=1)) for _, end, peer, info in far if end == mine.getsockname()]
    assert connections.spread_bursts({"127.0.0.3": [1], "10.1.2.3": ends["127.0.0.3"]}) == 0
    assert connections.spread_bursts(ends) == 1
    assert int.from_bytes(mine.getsockopt(socket.SOL_SOCKET, 47, 8), sys.byteorder) == connections._PACED
