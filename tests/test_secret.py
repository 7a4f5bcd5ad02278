"""Who knows the job's secret is taken for a rank of the job; others are named, or put out without harm."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

from benchmarks.ports import free_port
from benchmarks.rank_pool import RANKS
from espresso.comm.environment import read_environment
from espresso.comm.errors import DisagreementError, EspressoError, TopologyError
from espresso.comm.parameter_server.board import Board, Fact, StoreMail, check_alike
from espresso.comm.parameter_server.secret import SIZE, VARIABLE, Door, Secret, given_secret, introduce, knock
from espresso.comm.parameter_server.transport import LinkError
from tests.test_server_blame import connected

OURS, THEIRS = Secret(b"the secret of our job"), Secret(b"the secret of theirs")


def test_a_secret_in_the_environment_is_long_enough():
    assert given_secret({}) is None
    assert given_secret({VARIABLE: "x" * 16}) is not None
    with pytest.raises(TopologyError, match=r"has 3 characters, expected at least 16"):
        given_secret({VARIABLE: "abc"})


def test_what_is_sealed_is_read_under_its_label_only():
    sealed = OURS.seal("1/2", b"value")
    assert OURS.unseal("1/2", sealed) == b"value"
    for secret, label, data in (
        (THEIRS, "1/2", sealed),
        (OURS, "1/3", sealed),
        (OURS, "1/2", sealed[:-1]),
        (OURS, "1/2", b""),
    ):
        with pytest.raises(EspressoError, match="does not know this job's secret"):
            secret.unseal(label, data)


# -- the door --------------------------------------------------------------------------------------


def test_a_door_of_another_job_is_named():
    door = Door("127.0.0.1", THEIRS)
    with pytest.raises(LinkError, match=rf"put out by what listens at 127.0.0.1:{door.port}, where server rank 5"):
        knock(0, 5, "127.0.0.1", door.port, OURS, 5.0)
    door.close()


def test_a_listener_that_only_repeats_does_not_pass_for_a_server():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def repeat() -> None:
            visitor = listener.accept()[0]
            challenge = bytes(SIZE)
            visitor.sendall(challenge)
            visitor.sendall(visitor.recv(2 * SIZE)[SIZE:])
            visitor.close()

        threading.Thread(target=repeat, daemon=True).start()
        with pytest.raises(LinkError, match="which does not know this job's secret"):
            knock(0, 5, "127.0.0.1", listener.getsockname()[1], OURS, 5.0)


@pytest.mark.parametrize("garbage", [b"", b"x", b"GET / HTTP/1.0\r\n\r\n", secrets.token_bytes(1 << 16)])
def test_garbage_at_a_door_harms_nobody(garbage):
    door = Door("127.0.0.1", OURS)
    strangers = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(20)]
    for stranger in strangers:
        stranger.settimeout(5.0)
        stranger.sendall(garbage)
    knock(0, 5, "127.0.0.1", door.port, OURS, 5.0)  # while the strangers stay
    for stranger in strangers:
        assert len(stranger.recv(SIZE)) == SIZE
        if len(garbage) >= 2 * SIZE:
            with pytest.raises((ConnectionError, AssertionError)):
                assert stranger.recv(SIZE), "put out"
        stranger.close()
    door.close()


def drip(visit: socket.socket) -> int:
    """Send a byte ten times a second until the other side closes; how many were sent, at most half a challenge."""
    visit.settimeout(0.1)
    sent = 0
    with suppress(ConnectionError):
        while sent < SIZE // 2:
            sent += 1
            visit.sendall(b"x")
            with suppress(TimeoutError):
                if not visit.recv(1):
                    break
    return sent


def test_a_stranger_that_drips_is_put_out_in_time(monkeypatch):
    monkeypatch.setattr("espresso.comm.parameter_server.secret._VISIT_S", 0.35)
    door = Door("127.0.0.1", OURS)
    with socket.create_connection(("127.0.0.1", door.port)) as stranger:
        assert len(stranger.recv(SIZE)) == SIZE
        assert 1 < drip(stranger) < SIZE // 2
    door.close()


def test_a_listener_that_drips_holds_up_no_worker():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sent: list[int] = []

        def listen() -> None:
            with listener.accept()[0] as visit:
                sent.append(drip(visit))

        dripping = threading.Thread(target=listen)
        dripping.start()
        with pytest.raises(LinkError, match=r"cannot reach server rank 5 at .* \(timed out\)"):
            knock(0, 5, "127.0.0.1", listener.getsockname()[1], OURS, 0.35)
        dripping.join()
        assert 1 < sent[0] < SIZE // 2


# -- connections -----------------------------------------------------------------------------------


def introduced(known: list[Secret], timeout_s: float) -> list[str]:
    """Two workers and a server with these secrets: what each says."""
    transports = connected(3)
    said = [""] * 3

    def meet(rank: int) -> None:
        try:
            introduce(transports[rank], [2] if rank < 2 else [0, 1], known[rank], timeout_s)
        except LinkError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(len(known))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return said


def test_ranks_that_share_a_secret_meet():
    assert introduced([OURS, OURS, OURS], 10.0) == ["", "", ""]


def test_a_rank_without_the_secret_is_named_by_the_server():
    said = introduced([OURS, THEIRS, OURS], 10.0)
    assert said[0] == ""
    assert "rank 2 of the connections does not know" in said[1]
    assert "rank 1 of the connections does not know this job's secret" in said[2]


def test_a_rank_that_says_nothing_is_named_in_time():
    transports = connected(2)
    with pytest.raises(LinkError, match=r"rank 1 of the connections did not prove within 0.5 s"):
        introduce(transports[0], [1], OURS, 0.5)


# -- at the start ----------------------------------------------------------------------------------


def test_ranks_with_another_build_or_of_another_job_are_named():
    fact = Fact("espresso 1 (sources a)", 3, ("host",), "127.0.0.1", 1)
    check_alike([fact, fact])
    with pytest.raises(DisagreementError, match=r"rank 1 runs espresso 2, rank 0 runs espresso 1 \(sources a\)"):
        check_alike([fact, Fact("espresso 2", 3, ("host",), "127.0.0.1", 1)])
    with pytest.raises(DisagreementError, match="rank 1 is in a job of 4 ranks, rank 0 in one of 3"):
        check_alike([fact, Fact(fact.build, 4, ("host",), "127.0.0.1", 1)])


def meet_at_the_store(variables: dict[str, str], timeout_s: float, pipe: Any) -> None:
    """In a forked process: say what came of the meeting, and stay until told to go, since rank 0 holds the store."""
    for key in [key for key in os.environ if key.startswith(("OMPI_", "PMI", "SLURM", "ESPRESSO"))]:
        del os.environ[key]
    os.environ.update(variables)
    try:
        launch = read_environment()
        mine = Board(StoreMail(launch, timeout_s), launch)
        pipe.send(str(mine.exchange(("fact", int(variables["RANK"])))))
    except EspressoError as error:
        pipe.send(str(error))
    pipe.recv()
    os._exit(0)


def started(variables: list[dict[str, str]], timeout_s: float) -> list[str]:
    """What processes say that meet at one store."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ours, theirs = zip(*(RANKS.Pipe() for _ in variables), strict=True)
    processes = [
        RANKS.Process(target=meet_at_the_store, args=({**shared, **mine}, timeout_s, pipe), daemon=True)
        for mine, pipe in zip(variables, theirs, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        return [pipe.recv() if pipe.poll(100.0) else "" for pipe in ours]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("given", [{}, {VARIABLE: "a secret of sixteen"}])
def test_ranks_that_meet_at_a_store_exchange_values(given):
    assert started([{"RANK": "0", **given}, {"RANK": "1", **given}], 60.0) == ["[('fact', 0), ('fact', 1)]"] * 2


def test_ranks_of_agents_that_count_their_restarts_differently_meet():
    """An agent that is new, or that restarted since others came, counts from before."""
    first, second = ({"RANK": str(n), "TORCHELASTIC_RESTART_COUNT": str(n)} for n in range(2))
    assert started([first, second], 60.0) == ["[('fact', 0), ('fact', 1)]"] * 2


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({VARIABLE: "a secret of sixteen"}, {}, "rank 0 has ESPRESSO_JOB_SECRET in its environment, rank 1 has not"),
        ({}, {VARIABLE: "a secret of sixteen"}, "rank 1 has ESPRESSO_JOB_SECRET in its environment, rank 0 has not"),
        (
            {VARIABLE: "a secret of sixteen"},
            {VARIABLE: "another of sixteen"},
            "reported cannot be read: it does not know this job's secret",
        ),
    ],
)
def test_ranks_with_other_secrets_are_named(first, second, said):
    assert any(said in text for text in started([{"RANK": "0", **first}, {"RANK": "1", **second}], 6.0))


def test_a_rank_that_never_starts_is_named_within_the_time_out():
    (text,) = started([{"RANK": "0"}], 2.0)
    assert "rank 1 of 2 did not report at 127.0.0.1" in text
    assert "within 2 s; is it running?" in text


def test_two_processes_of_one_rank_are_named():
    texts = started([{"RANK": "0"}, {"RANK": "1"}, {"RANK": "1"}], 6.0)
    assert any("two processes say at 127.0.0.1" in text and "that they are rank 1" in text for text in texts)
