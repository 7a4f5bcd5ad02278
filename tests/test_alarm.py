"""Word of failures between ranks: who is blamed, from what was said and what was not."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from espresso.comm import alarm as alarm_module
from espresso.comm.alarm import Alarm
from espresso.comm.errors import LostRankError
from espresso.comm.witness import Witness

CLOSED = "Connection closed by peer"


@pytest.fixture
def alarms() -> Iterator[list[Alarm]]:
    """Four ranks in one process, over real datagrams."""
    made = [Alarm(rank) for rank in range(4)]
    for alarm in made:
        alarm.meet([one.card for one in made])
    yield made
    for alarm in made:
        alarm.close()


def die(alarm: Alarm) -> None:
    """Answer no more, without a word."""
    alarm.meet([])  # it knows nobody to tell
    alarm.close()


def blamed_by_rank_0(alarms: list[Alarm], lost: int | None) -> str:
    return Witness(0, alarms[0], lambda text: lost).who(CLOSED)


def test_a_rank_that_left_is_named(alarms):
    alarms[2].close()
    assert blamed_by_rank_0(alarms, 2) == " That is rank 2: it left, at its end or because of an error of its own."
    assert blamed_by_rank_0(alarms, None) == blamed_by_rank_0(alarms, 2)


def test_a_silent_rank_is_named_before_one_that_said_that_it_leaves(alarms):
    die(alarms[3])
    alarms[2].close()
    assert blamed_by_rank_0(alarms, 2).endswith(
        " Rank 3 does not answer: stopped, dead, or not to be reached from rank 0."
    )
    assert blamed_by_rank_0(alarms, 3) == " That is rank 3: it died, or left because of an error of its own."


def test_the_first_to_leave_is_named(alarms):
    alarms[3].close()
    alarms[2].close()
    assert " That is rank 3: it left" in blamed_by_rank_0(alarms, 2)


def test_a_rank_that_failed_is_named_with_its_reason_though_it_is_gone(alarms):
    alarms[1].announce("ValueError: no more bits")
    alarms[1].close()
    alarms[2].close()
    assert blamed_by_rank_0(alarms, 2).endswith(" Rank 1 failed first: ValueError: no more bits.")
    assert blamed_by_rank_0(alarms, 1) == " That is rank 1, which failed first: ValueError: no more bits."


def test_who_was_silent_during_a_wait_is_named_though_it_answers_at_its_end(alarms):
    cards = [one.card for one in alarms]
    witness = Witness(0, alarms[0], lambda text: None)
    witness.look("all is well", witness.glance())
    alarms[0].meet([*cards[:2], [*cards[2][:2], "00" * 16], cards[3]])  # rank 2 drops what does not name its secret
    silent = witness.glance()
    alarms[0].meet(cards)
    witness.look("a later wait, after one that ended well")
    with pytest.raises(LostRankError, match="making groups: Rank 2 was silent meanwhile: stopped, or"):
        witness.look("making groups", silent)


def test_who_leaves_at_the_same_time_is_not_waited_for(alarms, monkeypatch):
    monkeypatch.setattr(alarm_module, "_TELL_S", 30.0)
    for other in alarms[1:]:
        die(other)
    leaving = threading.Thread(target=alarms[0].close, daemon=True)
    leaving.start()
    (host, port, secret), sender = alarms[0].card, socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sender:
        while leaving.is_alive() and len(alarms[0].left()) < 3:
            for rank in (1, 2, 3):
                head = struct.pack("!16sBIIqii", bytes.fromhex(secret), 5, rank, 0, 0, 0, 0)
                sender.sendto(head, (host, port))
    leaving.join(10.0)
    assert not leaving.is_alive()


def test_of_a_long_text_the_end_travels(alarms):
    alarms[1].announce("why, " * 1000 + "That is rank 3: it died.")
    alarms[0].roll_call(1.0)
    assert alarms[0].failed()[1].endswith("why, That is rank 3: it died.")


def test_what_a_stranger_sends_is_dropped(alarms):
    host, port, _ = alarms[0].card
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for data in (b"", b"x" * 2000, bytes(16) + b"\x03" * 40):
            stranger.sendto(data, (host, port))
    assert alarms[0].roll_call(1.0).keys() == {1, 2, 3}
    assert not alarms[0].failed()
