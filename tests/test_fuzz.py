"""Some hundreds of the mutated files and checkpoints that ``python -m benchmarks.fuzz`` makes by the ten thousand."""

from typing import Any

import pytest

from benchmarks import fuzz_checkpoints, fuzz_files
from espresso.strategies import PLAIN, Cluster, FormError, Strategy, StrategyError, TensorSpec
from espresso.strategies.fields import MAX_VALUES, parse


@pytest.mark.parametrize(("run_slice", "count"), [(fuzz_files.run_slice, 700), (fuzz_checkpoints.run_slice, 400)])
def test_every_one_is_loaded_or_refused(run_slice: Any, count: int) -> None:
    tallies = run_slice(1, 0, count, 0.0)
    assert [row for tally in tallies.values() for row in tally.wrong] == []
    assert all(tally.outcomes["refused"] and tally.outcomes.total() > 30 for tally in tallies.values())
    assert any(tally.outcomes["loaded"] for tally in tallies.values())


def test_files_of_every_kind_go_through_commands() -> None:
    assert fuzz_files.COMMANDS.keys() == fuzz_files.kinds().keys()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 6000, "a whole number of 6000 digits"),
        (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
        (b"[NaN]", "NaN"),
        (b'["\\ud800"]', "surrogates not allowed"),
        (b"[" + b"0," * MAX_VALUES + b"0]", "more than"),
        (b" " * (17 << 20), "longer than 16 MiB"),
        (b"\xff", "not a JSON file"),
        (b"", "not a JSON file"),
    ],
)
def test_what_no_file_may_hold(data: bytes, says: str) -> None:
    with pytest.raises(FormError, match=says):
        parse(data)


def test_a_name_that_is_no_unicode_is_refused_where_no_file_was_read() -> None:
    """A checkpoint holds a strategy as values, whose text nobody has looked at."""
    strategy = Strategy.uniform([TensorSpec("layer", (4,))], Cluster(2, 1), PLAIN)
    body = strategy.to_json()
    body["tensors"][0]["name"] = "\ud800"
    with pytest.raises(StrategyError, match="name holds what is no Unicode"):
        Strategy.from_json(body)
