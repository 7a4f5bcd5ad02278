"""The emulated network: its rate is the rate, its counters count, and nothing of it stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.emulated import (
    DeadlineError,
    Distance,
    Host,
    Network,
    WorkerError,
    bulk_rate,
    format_rate,
    launch,
    measure_bulk_rate,
    measure_round_trip,
    open_network,
    parse_rate,
    remove_leftovers,
    run_workers,
    why_not_permitted,
)
from benchmarks.emulated.launch import cores_of

ROOT = Path(__file__).resolve().parents[1]
REFUSAL = why_not_permitted()
needs_namespaces = pytest.mark.skipif(REFUSAL is not None, reason=f"no network namespaces: {REFUSAL}")


def _namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"espresso-{pid}-")]


def _loopback(num_hosts: int) -> Network:
    hosts = tuple(Host(index, None, "127.0.0.1", "lo") for index in range(num_hosts))
    return Network(hosts, None, "the test asks for loopback")


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.parametrize(("text", "bits"), [("1gbit", 10**9), ("100mbit", 10**8), ("2.5Mbit", 2_500_000), ("8bit", 8)])
def test_rates_are_read(text: str, bits: int) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "1", "0mbit", "-1gbit", "1 gibit", "1gbps"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        parse_rate(text)


def test_rates_are_written() -> None:
    assert format_rate(956.4e6) == "956 Mb/s"
    assert format_rate(1e9) == "1 Gb/s"


@pytest.mark.parametrize("wrong", [{"num_hosts": 0}, {"num_hosts": 2, "rate": "1"}])
def test_wrong_networks_are_refused(wrong: dict[str, int | str]) -> None:
    with pytest.raises(ValueError, match=r"num_hosts|rate"), open_network(**wrong):
        pass


@needs_namespaces
def test_bulk_rate_is_the_limit_and_the_counter_counts() -> None:
    with open_network(2, "200mbit") as network:
        before = network.hosts[0].tx_bytes()
        first, second = measure_bulk_rate(network, 0.9)
        sent = network.hosts[0].tx_bytes() - before
    for rate in (first, second):
        assert rate.is_limited
        assert rate.payload_bps > 0.8 * 200e6
    # 0.9 s at 200 Mb/s in one direction, and acknowledgements in the other; once more where it was disturbed.
    once = 200e6 / 8 * 0.9
    tries = max(round(sent / once), 1)
    assert tries <= 3
    assert 0.7 * once < sent / tries < 1.4 * once


@needs_namespaces
@pytest.mark.parametrize(("rate", "burst_ms"), [("50mbit", 2.7), ("400mbit", 1.1), ("2gbit", 0.6)])
def test_a_rested_card_lets_little_through_at_once(rate: str, burst_ms: float) -> None:
    with open_network(2, rate) as network:
        shown = subprocess.run(
            ["tc", "-n", str(network.hosts[1].namespace), "-raw", "-json", "qdisc", "show", "dev", "eth0"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
    options = json.loads(shown.stdout)[0]["options"]
    assert 0.8 * burst_ms < 1e3 * options["burst"] / options["rate"] < burst_ms


SEND = (
    "import socket, sys; far = socket.create_connection((sys.argv[1], 5005))\nwhile True: far.sendall(bytes(1 << 20))"
)
TAKE = (
    "import socket; s = socket.create_server(('0.0.0.0', 5005)); print('', flush=True); near, _ = s.accept()\n"
    "while near.recv(1 << 20): pass"
)


@needs_namespaces
def test_a_connection_that_is_open_takes_the_rate_that_the_network_changes_to() -> None:
    with open_network(2, "1gbit") as network:
        first, second = network.hosts
        with subprocess.Popen(second.command([sys.executable, "-c", TAKE]), stdout=subprocess.PIPE) as takes:
            assert takes.stdout is not None
            takes.stdout.readline()
            with subprocess.Popen(first.command([sys.executable, "-c", SEND, second.address])) as sends:
                try:
                    for rate, least_bps in (("1gbit", 0.5e9), ("100mbit", 0.08e9)):
                        network.change(rate=rate)
                        time.sleep(0.3)
                        before = first.tx_bytes()
                        time.sleep(0.5)
                        assert 16 * (first.tx_bytes() - before) > least_bps
                finally:
                    sends.kill()
                    takes.kill()


@pytest.mark.parametrize(
    ("limit", "carried", "best", "times"),
    [(100, [99], 99, 1), (100, [50, 95, 96], 95, 2), (100, [60, 70, 65, 99], 70, 3), (None, [5, 6], 5, 1)],
)
def test_a_bulk_rate_below_the_limit_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, carried: list[float], best: float, times: int
) -> None:
    left = list(carried)
    monkeypatch.setattr(bulk_rate, "_transfer", lambda *_: left.pop(0))
    host = Host(0, None, "127.0.0.1", "lo", limit)
    assert bulk_rate._measure(host, host, 0.1, 0).payload_bps == best
    assert len(carried) - len(left) == times


@needs_namespaces
def test_more_hosts_meet_at_a_switch() -> None:
    with open_network(3, "50mbit") as network:
        rates = measure_bulk_rate(network, 0.45)
        assert [(rate.sender, rate.receiver) for rate in rates] == [(0, 1), (1, 2), (2, 0)]
        assert all(rate.is_limited for rate in rates)
        assert len(_namespaces_of(os.getpid())) == 4
    assert _namespaces_of(os.getpid()) == []


@pytest.mark.slow
@needs_namespaces
def test_hosts_far_apart() -> None:
    with open_network(3, "50mbit", distance=Distance(rtt_ms=40)) as network:
        assert measure_round_trip(network, 5) >= 40
        rates = measure_bulk_rate(network, 0.3)
        assert all(rate.is_limited and rate.payload_bps > 1e6 for rate in rates)
        network.change(rtt_ms=4, rate="20mbit", host=0)
        assert 4 <= measure_round_trip(network, 5) < 40
        first, second, _ = measure_bulk_rate(network, 0.4)
        assert first.payload_bps < 1.2 * 20e6 < second.payload_bps
        network.change(loss=0.99)
        assert measure_round_trip(network, 1) > 500
        assert len(_namespaces_of(os.getpid())) == 3
    assert _namespaces_of(os.getpid()) == []


@needs_namespaces
def test_a_local_network_changes_its_rate_alone_and_its_cards_go_down() -> None:
    with open_network(2, "50mbit") as network:
        network.change(rate="10mbit")
        assert all(rate.payload_bps < 1.1 * 10e6 for rate in measure_bulk_rate(network, 0.3))
        with pytest.raises(ValueError, match="rtt_ms"):
            network.change(rtt_ms=3)
        network.hosts[0].set_up(False)
        assert measure_round_trip(network, 1) > 500
    with pytest.raises(ValueError, match="loopback"):
        _loopback(2).hosts[0].set_up(False)


@pytest.mark.parametrize("wrong", [{"rtt_ms": -1}, {"loss": 1}, {"mtu": 100}, {"queue_ms": float("nan")}])
def test_wrong_distances_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Distance(**wrong)


@needs_namespaces
def test_an_error_inside_leaves_nothing() -> None:
    def fail_inside() -> None:
        with open_network(2):
            assert len(_namespaces_of(os.getpid())) == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert _namespaces_of(os.getpid()) == []


# A shell starts what it runs in the background with SIGINT ignored: the default is put back.
_HOLD = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from benchmarks.emulated import open_network, run_workers
with open_network(2) as network:
    code = "import os, time; open(os.environ['PIDS'] + '/' + str(os.getpid()), 'w'); time.sleep(60)"
    run_workers(network, [sys.executable, "-c", code], workers_per_host=2)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a network and four workers, which leave their process ids in ``tmp_path``."""
    env = {**os.environ, "PIDS": str(tmp_path)}
    holder = subprocess.Popen(_python(_HOLD), cwd=ROOT, env=env, stderr=subprocess.DEVNULL)
    try:
        _await_workers(holder, tmp_path)
        yield holder
    finally:
        holder.kill()
        holder.wait(timeout=30)


def _await_workers(holder: subprocess.Popen[bytes], pids: Path) -> None:
    deadline = time.monotonic() + 30
    while len(list(pids.iterdir())) < 4 and holder.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(list(pids.iterdir())) == 4
    assert len(_namespaces_of(holder.pid)) == 2


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@needs_namespaces
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_workers_and_network(
    sign: signal.Signals, holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    holder.send_signal(sign)
    # A second one, as impatient people send, must not spoil the cleaning up after the first.
    time.sleep(0.02)
    holder.send_signal(sign)
    assert holder.wait(timeout=30) != 0
    assert not [path.name for path in tmp_path.iterdir() if _is_running(int(path.name))]
    assert _namespaces_of(holder.pid) == []


@needs_namespaces
def test_what_a_killed_run_leaves_is_removed_later(holder: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert not set(_namespaces_of(holder.pid)) & set(remove_leftovers()), "the owner still lives"
    holder.kill()
    holder.wait(timeout=30)
    left = _namespaces_of(holder.pid)
    assert len(left) == 2
    command = [sys.executable, "-m", "benchmarks.emulated", "--clean"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60, stderr=subprocess.DEVNULL)
    assert _namespaces_of(holder.pid) == []
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(_is_running(int(path.name)) for path in tmp_path.iterdir()):
        time.sleep(0.05)
    assert not [path.name for path in tmp_path.iterdir() if _is_running(int(path.name))]


def test_workers_get_torchruns_variables_and_their_core(tmp_path: Path) -> None:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR GLOO_SOCKET_IFNAME EXTRA"
    code = "import json, os; print(json.dumps([sorted(os.sched_getaffinity(0)),"
    code += f"{{n: os.environ[n] for n in '{names}'.split()}}]))"
    network = _loopback(2)
    run_workers(network, _python(code), workers_per_host=2, pin=True, env={"EXTRA": "x"}, log_dir=tmp_path)
    for rank in range(4):
        cores, variables = json.loads((tmp_path / f"rank{rank}.log").read_text())
        assert set(cores) == cores_of(network.hosts[rank // 2])
        assert variables == {
            "RANK": str(rank),
            "WORLD_SIZE": "4",
            "LOCAL_RANK": str(rank % 2),
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": str(rank // 2),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
            "EXTRA": "x",
        }


def test_one_failing_worker_ends_all_and_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.5)
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit('the reason')\ntime.sleep(60)"
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 ended with status 1[\s\S]*the reason"):
        run_workers(_loopback(2), _python(code), log_dir=tmp_path)
    assert time.monotonic() - start < 20


def test_the_deadline_ends_workers_that_ignore_sigterm(tmp_path: Path) -> None:
    code = "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    code += "pathlib.Path(os.environ['PIDS'], str(os.getpid())).touch(); time.sleep(60)"
    with pytest.raises(DeadlineError, match="rank 0, 1"):
        run_workers(_loopback(2), _python(code), env={"PIDS": str(tmp_path)}, deadline_s=2.5)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not [pid for pid in pids if _is_running(pid)]


def test_what_is_counted_of_a_transfer() -> None:
    from benchmarks.emulated.bulk_peer import count

    late = [(0.5, 9), (1.0, 3), (1.1, 10), (1.1, 10), (1.2, 4), (1.3, 10)]  # woke up late at 1.1
    assert count(late, 1.0, 10) == (24, pytest.approx(0.2))
    assert count([(0.5, 10), (1.0, 10), (1.5, 10), (2.0, 10)], 1.0, 10) == (20, 1.0)  # never caught up
    assert count([(1.0, 10), (1.5, 4), (2.0, 10)], 1.0, 10) == (14, 1.0)  # once
    with pytest.raises(ValueError, match="4 bytes came, and fewer than two reads"):
        count([(1.0, 4)], 1.0, 10)


def test_without_permission_it_says_so_and_uses_loopback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level("WARNING", "espresso.emulated"), open_network(2) as network:
        assert network.rate_bps is None
        assert "missing" in str(network.why_unlimited)
        assert {host.interface for host in network.hosts} == {"lo"}
        (rate, _) = measure_bulk_rate(network, 0.15)
        assert rate.payload_bps > 0
        assert not rate.is_verified
    assert "loopback without a limit" in caplog.text
