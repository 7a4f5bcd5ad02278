"""Addresses in errors become ranks."""

import socket

from espresso.comm.endpoints import local_ends, rank_in


def test_both_ends_of_a_connection_are_found():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as calling:
            ends = local_ends()
            assert {port, calling.getsockname()[1]} <= set(ends["127.0.0.1"])
    assert port not in local_ends().get("127.0.0.1", ())  # closed, so no longer this process's


def test_addresses_of_the_sixth_version():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        assert listener.getsockname()[1] in local_ends()["::1"]


def test_a_rank_is_named_only_where_one_is_meant():
    everybody = [{"10.0.0.1": (80, 81)}, {"10.0.0.2": (80,)}, {"10.0.0.2": (90,), "::1": (7,)}]
    assert rank_in("Connection closed by peer [10.0.0.2]:80", everybody) == 1
    assert rank_in("Connection closed by peer [::1]:7", everybody) == 2
    assert rank_in("Read error [10.0.0.2]:23040: reset", everybody) == 2  # 90 with its bytes exchanged
    assert rank_in("Timed out waiting 2000ms", everybody) is None
    assert rank_in("peer [10.0.0.9]:80", everybody) is None
    assert rank_in("peer [10.0.0.1]:80 and [10.0.0.2]:80", everybody) is None
    assert rank_in("peer [127.0.0.1]:5", [{"127.0.0.1": (5,)}] * 2) is None  # two hosts' loopbacks
