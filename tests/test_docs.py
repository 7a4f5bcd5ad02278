"""What the documentation shows runs: every fence of README and manual, the example of a compressor, tables, links.

A page's Python fences run one after the other on two ranks, its shell fences in one folder. Comments before a fence say
what a reader does not have to see::

    <!-- not run: why not -->          the next fence is not run
    <!-- file: name -->                the next fence is a file of that name in the page's folder
    <!-- given
    Python                             runs before the next fences do
    -->
"""

import ast
import json
import os
import pydoc
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from compressor_cases import DTYPES, ODD_SIZES, numbers, pieces, round_trip
from typer.testing import CliRunner

import espresso.compressors
import espresso.cpu_offload
from benchmarks import front_picture
from espresso.cli import app
from espresso.compressors import Decoding, ErrorFeedback, PayloadError, registry
from tests.ddp import measure_briefly
from tests.workers import run_ranks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
MANUAL = DOCS / "add_compressor.md"

NO_CODE = ("text", "{eval-rst}", "{toctree}")
"""Languages of fences that hold no code: output, drawings, and what the site's generator reads."""

PIECE = re.compile(
    r"^<!--[ ]not[ ]run:(?P<reason>.*?)-->\n(?=```)"
    r"|^<!--[ ]file:(?P<file>.*?)-->\n(?=```)"
    r"|^<!--[ ]given\n(?P<given>.*?)^-->"
    r"|^```(?P<language>\S*)\n(?P<body>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)

SETTING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import espresso
"""


@dataclass(frozen=True)
class Fence:
    """A fence of a page; ``given`` is what runs before it."""

    language: str
    body: str
    file: str = ""
    given: str = ""
    reason: str = ""


def fences(page: Path) -> list[Fence]:
    """All fences of a page that hold code, with the comments before them."""
    found, file, given, reason = [], "", "", ""
    for piece in PIECE.finditer(page.read_text()):
        if piece["reason"] is not None:
            reason = piece["reason"].strip()
        elif piece["file"] is not None:
            file = piece["file"].strip()
        elif piece["given"] is not None:
            given += piece["given"]
        elif piece["language"] not in NO_CODE:
            found.append(Fence(piece["language"], piece["body"], file, given, reason))
            file = given = reason = ""
    return found


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if any(f.language == language and not f.reason for f in fences(page))]


# -- fences ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_fences_say_what_they_are(page: Path) -> None:
    text = page.read_text()
    assert text.count("\n```") % 2 == 0
    assert text.count("<!-- not run:") == sum(bool(fence.reason) for fence in fences(page))
    for fence in fences(page):
        assert fence.language in ("python", "bash", "json"), f"{page.name}: a fence is {fence.language!r}"
    code = re.sub(r"^(```|<!--).*?^(```|.*-->)$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert not re.search(r"\n\n    \S", code), f"{page.name}: code that is indented is not run; put it in a fence"


def run_python(rank: int, blocks: list[str], folder: str) -> None:
    os.chdir(folder)
    measure_briefly()
    names = {"__name__": "__main__"}
    for block in (SETTING, *blocks):
        exec(compile(block, "a fence", "exec"), names)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", [p for p in pages_with("python") if p != MANUAL], ids=lambda page: page.stem)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    chosen = [fence for fence in fences(page) if fence.language == "python" and not fence.reason]
    blocks = [part for fence in chosen for part in (fence.given, fence.body)]
    own_group = any("init_process_group" in block for block in blocks)
    run_ranks(run_python, 2, blocks, str(tmp_path), init=not own_group, deadline_s=300)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", pages_with("bash"), ids=lambda page: page.stem)
def test_shell_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of ours that start no processes run in this one, which has all they import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for fence in fences(page):
        if fence.file:
            Path(fence.file).write_text(fence.body)
    for line in (x for f in fences(page) if f.language == "bash" and not f.reason for x in f.body.splitlines()):
        assert not line.endswith("\\")
        words = shlex.split(line, comments=True)
        if words[0] == "espresso" and words[1] != "profile":
            outcome = CliRunner().invoke(app, words[1:])
            assert outcome.exit_code == 0, f"{line}\n{outcome.output}"
        else:
            done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_json_is_a_file_that_a_command_reads() -> None:
    for page in PAGES:
        for fence in fences(page):
            if fence.language == "json":
                json.loads(fence.body)
                assert any(other.language == "bash" and fence.file in other.body for other in fences(page)), fence.file


# -- the manual's own figures, words and links -----------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_lines(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for number, line in enumerate(text.splitlines(), 1):
        assert len(line) <= 120 or line.startswith("|"), f"{page.name}:{number} has {len(line)} columns"


def test_readme_is_for_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_every_page_is_in_the_contents() -> None:
    index = (DOCS / "index.md").read_text().splitlines()
    assert not {page.stem for page in DOCS.glob("*.md")} - {"index"} - set(index)


def test_the_picture_is_of_the_committed_results() -> None:
    assert front_picture.PICTURE.read_text() == front_picture.draw(), "run python -m benchmarks.front_picture"


def test_measured_cases_are_the_committed_ones() -> None:
    rows = re.findall(
        r"^\| ((?:mlp|gpt|resnet|vit|lstm)-\w+) \|.*$", (DOCS / "when_it_pays.md").read_text(), re.MULTILINE
    )
    assert len(rows) > 10
    for row in re.finditer(r"^\| (\w+-\w+) \|.*$", (DOCS / "when_it_pays.md").read_text(), re.MULTILINE):
        cells = [cell.strip() for cell in row[0].strip("|").split("|")]
        body = json.loads((ROOT / "benchmarks" / "results" / f"speed_{row[1]}.json").read_text())
        arms = {arm["arm"]: arm for arm in body["rows"]}
        plain, ours = arms["plain"], arms[f"espresso:{cells[3].strip('`')}"]
        sent = f"{plain['mb_per_step_per_host']:.1f}, {ours['mb_per_step_per_host']:.1f}"
        shares = [f"{ours['of_plain']['value']:.1f}", f"{100 * ours['of_compute']['value']:.0f} %"]
        assert cells[4:] == [*shares, sent], row[0]


def test_the_manual_names_every_id() -> None:
    text = (DOCS / "choosing.md").read_text()
    for name in registry.compressor_ids():
        assert f"| `{name}` |" in text, f"docs/choosing.md has no row for {name}"


def test_names_of_ours_exist() -> None:
    """Every dotted name that a page or an example uses can be imported as it is written."""
    texts = [(page.name, page.read_text()) for page in (*PAGES, *(ROOT / "examples").glob("*.py")) if page != MANUAL]
    used = {(where, name) for where, text in texts for name in re.findall(r"(?<![\w./-])espresso(?:\.\w+)+", text)}
    assert len(used) > 20
    for where, name in sorted(used):
        if name not in ("espresso.launch", "espresso.py"):
            try:
                found = pydoc.locate(name)
            except pydoc.ErrorDuringImport as error:  # an adapter of a framework that is not here
                missing = error.value.name if isinstance(error.value, ModuleNotFoundError) else None
                assert missing is not None, f"{where} uses {name}, which cannot be imported"
                assert not missing.startswith("espresso"), f"{where} uses {name}, which needs {missing}"
                continue
            assert found is not None, f"{where} uses {name}"


def test_help_names_what_is_shipped() -> None:
    from espresso.model.presets import cluster_names, trace_names

    told = (ROOT / "espresso" / "commands" / "job.py").read_text()
    assert f'help="{", ".join(trace_names())}, or the path' in told
    assert f'help="{", ".join(cluster_names())}, or the path' in told


def test_messages_in_troubleshooting_are_ours() -> None:
    """Each quoted message is, between its ellipses, in the source."""
    source = " ".join(
        re.sub(r"\{[^{}]*\}", "…", re.sub(r'"\s*\n\s*f?"', "", path.read_text()))
        for folder in ("espresso", "strategies", "comm")
        for path in (ROOT / folder).rglob("*.py")
    )
    table = (DOCS / "troubleshooting.md").read_text().partition("message | why")[2]
    first_cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    quoted = re.findall(r"`([^`]+)`", "".join(first_cells))
    assert len(quoted) > 15
    for message in quoted:
        for part in re.split(r"…", message):
            assert len(part.strip()) < 5 or part.strip(" '") in source, (
                f"{message!r}: {part.strip()!r} is in no message"
            )


# -- the map of the rooms --------------------------------------------------------------------------


def test_the_map_is_that_of_the_rooms() -> None:
    """The architecture page's table and drawing say what the rooms' own first lines say."""
    text = (DOCS / "architecture.md").read_text()
    drawn = dict(re.findall(r"^\| `([a-z_.]+)` \| ([a-z_., ]+) \|", text, re.MULTILINE))
    said = {}
    for folder in (*("strategies", "compressors", "cpu_offload", "comm"), "espresso"):
        for init in (ROOT / folder).rglob("__init__.py"):
            room = ".".join(init.parent.relative_to(ROOT).parts).removeprefix("espresso.")
            doc = " ".join((ast.get_docstring(ast.parse(init.read_text())) or "").split())
            if rule := re.search(r"May import: ([a-z_., ]+?)\.(?: |$)", doc):
                said[room] = rule[1]
    assert drawn == said
    drawing = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert drawing
    line_of = {word: i for i, line in enumerate(drawing[1].splitlines()) for word in re.findall(r"[a-z_.]+", line)}
    assert set(line_of) == set(said)
    for room, below in said.items():
        if below != "nothing of ours":
            assert all(line_of[room] < line_of[other] for other in below.split(", ")), f"{room} stands below {below}"


def test_the_way_of_a_bucket_names_files_of_its_rooms() -> None:
    folders = {"live": "espresso/live", "execute": "comm/execute", "program": "comm/program", "comm": "comm"}
    _, way = re.findall(r"```text\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)
    room, found = "", 0
    for line in way.splitlines():
        room = line.split()[0] if line[:1].strip() else room
        for name in re.findall(r"\w+\.py", line):
            found += 1
            assert (ROOT / folders[room] / name).exists(), f"{name} is not in {room}"
    assert found > 12


def test_files_that_pages_name_are_there() -> None:
    homes = (ROOT, ROOT / "espresso")
    for page in set(PAGES) - {MANUAL}:
        for name in re.findall(r"`([a-z_]+/[a-z_/]+\.(?:py|cu|cuh|json|md))`", page.read_text()):
            assert any((home / name).exists() for home in homes), f"{page.name} names {name}"


# -- the example of a compressor -------------------------------------------------------------------


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
        outcome.codec.decode(
            Decoding(outcome.layout, numbers(300, np.float32), outcome.starts), outcome.payload.reshape(1, -1)
        )
