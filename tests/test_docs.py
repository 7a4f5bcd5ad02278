"""The example in the compressors' manual, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from compressor_cases import DTYPES, ODD_SIZES, numbers, pieces, round_trip

import espresso.compressors
import espresso.cpu_offload
from espresso.compressors import ErrorFeedback, PayloadError, registry

MANUAL = Path(__file__).parents[1] / "docs" / "compressors.md"


def block_after(text: str, mark: str) -> str:
    """The first block of code after a mark."""
    found = re.search(r"```python\n(.*?)```", text[text.index(mark) :], re.DOTALL)
    assert found
    return found.group(1)


@pytest.fixture
def int16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    text = MANUAL.read_text()
    for folder, package in (("compressors", espresso.compressors), ("cpu_offload", espresso.cpu_offload)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "int16.py").write_text(block_after(text, f"`{folder}/int16.py`:"))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / folder)])
    line = eval("{" + block_after(text, "In `compressors/registry.py`:") + "}", {"Entry": registry.Entry})
    monkeypatch.setitem(registry._ENTRIES, "int16", line["int16"])
    return "int16:raw_below=1"


def test_the_example_is_a_compressor(int16: str) -> None:
    for dtype in DTYPES:
        outcome = round_trip(int16, ODD_SIZES, dtype)
        assert outcome.finite
        assert np.array_equal(outcome.kept, outcome.q - outcome.decoded)
        for q, decoded, _ in pieces(outcome):
            top = np.abs(q).max(initial=0)
            assert np.abs(q - decoded).max(initial=0) <= top / 65534 * (1 + 1e-3) + 1e-30
        wrapped = round_trip(int16, ODD_SIZES, dtype, wrap=ErrorFeedback)
        assert wrapped.payload.tobytes() == outcome.payload.tobytes()

    def spoil(source: np.ndarray, starts: np.ndarray) -> None:
        source[3] = np.nan

    assert not round_trip(int16, (300,), np.float32, change=spoil).finite
    outcome = round_trip(int16, (300,), np.float32)
    outcome.payload[int(outcome.layout.offsets[0]) :][:8].view(np.float64)[0] = -1
    with pytest.raises(PayloadError, match="scale"):
        outcome.codec.decode(outcome.layout, outcome.payload.reshape(1, -1), numbers(300, np.float32), outcome.starts)


def test_the_manual_names_every_id() -> None:
    text = MANUAL.read_text()
    for name in registry.compressor_ids():
        assert f"| `{name}` |" in text, f"docs/compressors.md has no row for {name}"
