"""Servers that work for long say so to a worker, which listens to all of them at once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from espresso.comm.parameter_server import Client, server
from espresso.comm.parameter_server.wire import Op
from tests.test_server_blame import serving

TIMEOUT_S = 1.0
LONG_S = 2.5


def compile_for(specs: Any, dtypes: Any) -> None:
    """So many seconds."""
    time.sleep(sum(map(float, dtypes)))


@pytest.mark.parametrize("seconds", [(LONG_S, 0.0), (LONG_S, LONG_S)], ids=str)
def test_of_several_servers_each_may_compile_longer_than_the_time_out(seconds, monkeypatch):
    monkeypatch.setattr(server, "_SIGN_S", 0.2)
    with serving(1, 2, TIMEOUT_S, prepare=compile_for) as (transports, servers):
        bodies = {number: (set(), {str(each)}) for number, each in enumerate(seconds)}
        assert Client(transports[0], 1).ask_all(Op.PREPARE, bodies, TIMEOUT_S) == {0: None, 1: None}
        assert [each.error for each in servers] == [None, None]
