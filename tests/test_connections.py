"""Connections are left as they are, but those between hosts far apart whose bursts are lost on the way."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from benchmarks.emulated import Distance, open_network, run_workers, why_not_permitted
from espresso.comm import connections

REFUSAL = why_not_permitted()

BURSTS = """
import json, os, sys, time
import torch
import torch.distributed as dist
from espresso.comm import connections
from espresso.comm.groups import Groups
from espresso.strategies import Scope

def limits():
    return sorted({info.limit for _, info in connections._to_other_hosts() if info.window * info.mss > connections.WIDE_BYTES})

dist.init_process_group("gloo")
groups = Groups(timeout_s=60)
numbers = torch.zeros(1_500_000)
for step in range(10):
    groups.barrier()
    time.sleep(0.02)
    dist.all_reduce(numbers, group=groups.scopes[Scope.FLAT].group)
before = limits()
groups.spread_bursts()
found = [before, limits(), connections.sent().num_bytes]
print(json.dumps(found))
groups.barrier()
groups.close()
dist.destroy_process_group()
"""


def _limits(tmp_path: Path, rtt_ms: float) -> tuple[list[int], list[int]]:
    root = str(Path(__file__).resolve().parents[1])
    with open_network(2, "200mbit", distance=Distance(rtt_ms=rtt_ms, queue_ms=20)) as network:
        argv = [sys.executable, "-c", BURSTS]
        run_workers(network, argv, log_dir=tmp_path, deadline_s=90, env={"PYTHONPATH": root + os.pathsep})
    before, after, num_bytes = json.loads((tmp_path / "rank0.log").read_text().splitlines()[-1])
    assert num_bytes > 9 * 6_000_000
    return before, after


@pytest.mark.slow
@pytest.mark.skipif(REFUSAL is not None, reason=f"no network namespaces: {REFUSAL}")
def test_bursts_that_are_lost_far_away_are_spread_at_no_rate_of_ours(tmp_path: Path) -> None:
    before, after = _limits(tmp_path, 50)
    assert before == [connections._UNLIMITED]
    assert after == [connections._PACED]


def test_what_is_near_or_belongs_to_others_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener, socket.socket() as mine:
        listener.bind(("127.0.0.2", 0))
        listener.listen()
        mine.bind(("127.0.0.3", 0))
        mine.connect(listener.getsockname())
        theirs, _ = listener.accept()
        with theirs:
            both = {"127.0.0.2", "127.0.0.3"}
            assert connections.spread_bursts(both) == 0
            far = [(each, info._replace(rtt_us=9000, window=99)) for each, info in connections._to_other_hosts()]
            if not far:
                pytest.skip("this system does not tell")
            monkeypatch.setattr(connections, "_to_other_hosts", lambda: iter(far))
            assert connections.spread_bursts(both) == 0  # nothing was lost
            far = [(mine, info._replace(resent=1)) for _, info in far[:1]]
            assert connections.spread_bursts({"10.1.2.3"}) == 0
            assert connections.spread_bursts(both) == 1
            assert int.from_bytes(mine.getsockopt(socket.SOL_SOCKET, 47, 8), sys.byteorder) == connections._PACED
