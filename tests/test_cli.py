"""The command line: every command, its JSON, its exit statuses, and every way a user can get it wrong."""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from espresso.cli import app
from espresso.comm.errors import DisagreementError, LostRankError
from espresso.commands import _common
from espresso.flight.form import Flight, Script, Span, StepRecord, Stretch
from espresso.model.job import Job
from espresso.model.payload_sizes import compressed, offloaded
from espresso.search.search import GREEDY, PUBLISHED
from espresso.show.flight_events import step_events
from espresso.strategies import NONE, Choice, Cluster, CompressorSpec, Strategy, TensorSpec, parse_option
from tests.test_bucket_caps import ddp_job
from tests.timeline_jobs import compute
from tests.workers import run_ranks

ROOT = Path(__file__).resolve().parents[1]
RUNNER = CliRunner()
COMMANDS = ("job", "search", "explain", "validate", "simulate", "compare", "profile", "links")


def espresso(*args: str | Path) -> Result:
    result = RUNNER.invoke(app, [str(arg) for arg in args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def printed(result: Result) -> dict[str, Any]:
    """The one JSON object on stdout."""
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert isinstance(body, dict)
    return body


def refused(result: Result, *words: str, status: int = 1) -> None:
    """The command failed with one message that says all of ``words``, and nothing on stdout."""
    assert result.exit_code == status, result.output
    assert result.stdout == ""
    assert result.stderr.lstrip().startswith("error: ")  # a progress display that was slow leaves an empty line
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def as_process(*args: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The real thing: ``python -m espresso``."""
    argv = [sys.executable, "-m", "espresso", *map(str, args)]
    return subprocess.run(
        argv,
        cwd=cwd,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(autouse=True)
def no_width_of_somebodys_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug-in that spreads tests over processes sets one."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small job and a strategy that was searched for it."""
    folder = tmp_path_factory.mktemp("cli")
    job, strategy = folder / "job.json", folder / "strategy.json"
    argv = ("--nodes", "2", "--ranks-per-node", "2", "--cluster", "pcie-25g", "-o")
    assert espresso("job", "lstm", *argv, job).exit_code == 0
    assert espresso("search", job, "--compressor", "dgc:ratio=0.01", "-o", strategy).exit_code == 0
    return {"job": job, "strategy": strategy}


def edited(path: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a JSON file with other top-level keys; None removes one."""
    body = {**json.loads(path.read_text()), **changes}
    copy = folder / f"edited-{path.name}"
    copy.write_text(json.dumps({key: value for key, value in body.items() if value is not None}))
    return copy


# -- help and start-up -------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(command: str) -> None:
    result = espresso(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_help_lists_the_commands_and_version_prints() -> None:
    import importlib

    overview = espresso("--help").stdout
    assert not [command for command in COMMANDS if command not in overview]
    assert espresso("--version").stdout == f"espresso {importlib.import_module('espresso').__version__}\n"


def test_help_and_search_do_not_load_torch(files: dict[str, Path], tmp_path: Path) -> None:
    code = (
        "import sys; from espresso.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'matplotlib'} & set(sys.modules)\n"
        "sys.stderr.write(','.join(sorted(heavy)) or 'light')"
    )
    argvs: list[list[str]] = [["--help"], ["explain", str(files["strategy"])]]
    argvs.append(["search", str(files["job"]), "-c", "dgc:ratio=0.01", "--json"])
    for argv in argvs:
        done = subprocess.run(
            [sys.executable, "-c", code, *argv],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert done.stderr.endswith("light"), done.stderr


def test_help_is_quick() -> None:
    took = []
    for _ in range(3):
        begin = time.perf_counter()
        assert as_process("--help", cwd=ROOT).returncode == 0
        took.append(time.perf_counter() - begin)
    # Far above what it takes alone, so that a busy machine does not matter; loading torch alone takes longer.
    assert min(took) < 1.0, took


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_output_that_is_closed_is_for_nobody(files: dict[str, Path], closed: str) -> None:
    argv = ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, "-m", "espresso", "explain", str(files["strategy"])]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- the way from a trace to a strategy --------------------------------------------------------------


def test_job_reports_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "j.json"
    argv = ("--nodes", "8", "--ranks-per-node", "4", "--cluster", "nvlink-100g", "-o", path, "--json")
    body = printed(espresso("job", "gpt2", *argv))
    assert (body["num_tensors"], body["num_nodes"], body["ranks_per_node"]) == (148, 8, 4)
    assert body["job"] == str(path)
    assert body["backward_us"] > 0
    assert "Espresso" in body["source"]
    assert len(json.loads(path.read_text())["tensors"]) == 148


def test_search_prints_the_promised_keys(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    body = printed(espresso("search", files["job"], "-c", "dgc:ratio=0.01", "-o", path, "--json"))
    promised = {"predicted_us", "late_us", "uncompressed_us", "upper_bound_us", "search_ms"}
    promised |= {"num_tensors", "num_compressed", "num_offloaded"}
    assert promised <= set(body)
    assert all(isinstance(body[key], int | float) for key in promised)
    assert 0 < body["upper_bound_us"] <= body["predicted_us"] <= body["uncompressed_us"]
    assert body["num_compressed"] > 0
    strategy = Strategy.load(path)
    assert len(strategy.tensors) == body["num_tensors"]
    assert len(compressed(strategy)) == body["num_compressed"]
    assert len(offloaded(strategy)) == body["num_offloaded"]


def test_search_table_shows_choices_and_bound(files: dict[str, Path]) -> None:
    result = espresso("search", files["job"], "-c", "dgc:ratio=0.01")
    assert result.exit_code == 0
    for word in ("dgc:ratio=0.01", "uncompressed", "chosen", "upper bound", "leaves a tensor searched in"):
        assert word in result.stdout, word


def test_search_json_is_clean_in_a_real_process(files: dict[str, Path], tmp_path: Path) -> None:
    argv = ("search", files["job"], "-c", "efsignsgd", "-c", "dgc:ratio=0.01", "--json")
    done = as_process(*argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["compressors"] == ["efsignsgd", "dgc:ratio=0.01"]
    assert len(done.stdout.splitlines()) == 1


def test_simulate_agrees_with_search_and_writes_both_files(files: dict[str, Path], tmp_path: Path) -> None:
    trace, plot = tmp_path / "t.json", tmp_path / "p.png"
    argv = ("simulate", files["job"], files["strategy"], "--trace", trace, "--plot", plot, "--json")
    body = printed(espresso(*argv))
    notes = Strategy.load(files["strategy"]).notes
    assert body["predicted_us"] == pytest.approx(notes["predicted_us"], rel=1e-9)
    assert body["predicted_us"] < body["uncompressed_us"]
    assert {row["lane"] for row in body["lanes"]} >= {"backward", "inter_out", "inter_in"}
    assert all(0 < row["utilisation"] <= 1 for row in body["lanes"])
    events = json.loads(trace.read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == sum(row["intervals"] for row in body["lanes"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    table = espresso("simulate", files["job"], files["strategy"]).stdout
    assert "inter_out" in table
    assert "% │" in table
    named = tmp_path / "named.json"
    replace(Job.load(files["job"]), model="a[red]b[/x]").save(named)
    assert "a[red]b[/x], " in espresso("simulate", named, files["strategy"]).stdout


def test_a_strategys_bucket_size_is_simulated_and_replanned(tmp_path: Path) -> None:
    job, strategy, again = (tmp_path / f"{name}.json" for name in ("job", "strategy", "again"))
    # One bucket leaves the link idle until backward ends; small ones overlap.
    ddp_job([1 << 18] * 8, [0, *[3000] * 7], beta=8.0, costs=compute(2.0, 1.0)).save(job)
    found = printed(espresso("search", job, "-c", "efsignsgd", "--bucket-caps", "-o", strategy, "--json"))
    assert found["bucket_cap_mb"]
    body = printed(espresso("simulate", job, strategy, "--json"))
    assert body["predicted_us"] == pytest.approx(found["predicted_us"], rel=1e-9)
    assert body["uncompressed_us"] == pytest.approx(found["bucket_caps"][0]["uncompressed_us"], rel=1e-9)
    replanned = espresso("search", job, "-c", "efsignsgd", "--from", strategy, "-o", again)
    assert f"bucket_cap_mb={found['bucket_cap_mb']:g}): as the old strategy asks" in replanned.output
    assert Strategy.load(again).bucket_cap_mb == found["bucket_cap_mb"]
    assert printed(espresso("simulate", job, again, "--json"))["predicted_us"] <= body["predicted_us"] * (1 + 1e-9)


def test_simulate_shows_a_recorded_step_beside_the_predicted_one(files: dict[str, Path], tmp_path: Path) -> None:
    strategy, job = Strategy.load(files["strategy"]), Job.load(files["job"])
    stretch = Stretch(strategy, job.laid_out)
    ready = tuple(1e3 * (n + 1) for n in range(len(job.laid_out)))
    spans = tuple(Span(task.index, 5e3, 5e3, 6e3, 8) for task in stretch.plan.tasks)
    steps = tuple(StepRecord(number, 0, Script(), ready, 9e3, spans=spans) for number in (7, 8))
    run, trace = tmp_path / "run", tmp_path / "t.json"
    argv = ("simulate", files["job"], files["strategy"], "--measured", run)
    run.mkdir()
    Flight(1, 4, "gpu7", job.cluster, (stretch,), steps).save(run / "flight-00001.json")
    assert espresso(*argv, "--trace", trace, "--plot", tmp_path / "p.png").exit_code == 0
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["predicted", "measured gpu7.1"]
    ran = [event for event in events if event["ph"] == "X" and event["pid"] == 2]
    held = sum(len(task.lanes) for task in stretch.plan.tasks)
    assert len(ran) == held + len(ready)  # backward's too
    other = Strategy.uniform(strategy.tensors, strategy.cluster)
    Flight(1, 4, "gpu7", job.cluster, (Stretch(other, job.laid_out),), ()).save(run / "flight-00001.json")
    refused(espresso(*argv), "ran this strategy")
    whole = Stretch(Strategy.uniform(strategy.tensors, strategy.cluster, partition_bytes=0), job.laid_out)
    plain = Flight(1, 4, "gpu7", job.cluster, (whole,), (replace(steps[0], spans=(Span(0, 5e3, 5e3, 6e3, 8),)),))
    assert step_events([plain], other)  # whole buckets were averaged, whatever it says of partitions
    (run / "flight-00001.json").write_text("{}")
    refused(espresso(*argv), "flight-00001.json")
    refused(espresso(*argv[:-1], tmp_path / "none"), "holds no flight records")


def test_compare_ranks_the_baselines(files: dict[str, Path], tmp_path: Path) -> None:
    picture = tmp_path / "rows.svg"
    argv = ("compare", files["job"], "-c", "dgc:ratio=0.01")
    rows = json.loads(espresso(*argv, "--json", "--ablation", "--plot", picture).stdout)
    times = {row["name"]: row["predicted_us"] for row in rows}
    policies = {"HiPress", "HiTopKComm", "BytePS-Compress"}
    assert {"uncompressed", "chosen", "myopic", PUBLISHED, GREEDY} | policies <= set(times)
    kinds = {row["kind"]: [r["predicted_us"] for r in rows if r["kind"] == row["kind"]] for row in rows}
    assert times["chosen"] == min(kinds["baseline"] + kinds["searched"])
    assert times["certified lower bound"] <= min(kinds["baseline"] + kinds["searched"] + kinds["ablation"])
    assert times["only: offload only"] >= times["certified lower bound"]
    drawn = picture.read_text()
    assert not [name for name in times if f"<!-- {name} -->" not in drawn]
    assert "BytePS-Compress" in espresso(*argv).stdout


def test_explain_shows_every_tensor_group(files: dict[str, Path]) -> None:
    body = printed(espresso("explain", files["strategy"], "--json"))
    strategy = Strategy.load(files["strategy"])
    names = [name for group in body["groups"] for name in group["tensors"]]
    assert sorted(names) == sorted(tensor.name for tensor in strategy.tensors)
    assert body["num_compressed"] == len(compressed(strategy)) > 0
    sites = [step["site"] for group in body["groups"] for step in group["steps"] if step["site"]]
    assert sites
    text = espresso("explain", files["strategy"]).stdout
    for group in body["groups"]:
        assert group["tensors"][0] in text
    assert "residual kept" in text
    assert "gains" not in text
    assert (body["bucket_cap_mb"], body["gain_scale"]) == (None, 1.0)


def test_explain_says_what_a_strategy_asks_of_buckets_and_gains(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "asks.json"
    asked = replace(Strategy.load(files["strategy"]), bucket_cap_mb=5.0)
    for scale, moved in ((0.5, {"efsignsgd"}), (4.0, {"efsignsgd", "dgc:ratio=0.01"})):
        said = set()
        for compressor in ("efsignsgd", "dgc:ratio=0.01", "int8", "dgc:momentum=0.9,ratio=0.01"):
            spec = CompressorSpec.parse(compressor)
            choices = {t: replace(c, compressor=spec) if c.compressor != NONE else c for t, c in asked.choices.items()}
            replace(asked, choices=choices, gain_scale=scale).save(path)
            text = " ".join(espresso("explain", path).stdout.split())
            assert "buckets are to hold up to 5 MB" in text
            said |= {compressor for _ in "1" if f"gain of {compressor} is {scale:g} times the usual" in text}
        assert said == moved


def test_validate_accepts(files: dict[str, Path]) -> None:
    body = printed(espresso("validate", files["strategy"], "--job", files["job"], "--json"))
    assert body["valid"] is True
    assert body["fingerprint"].startswith("sha256:")
    assert "is valid, and fits" in espresso("validate", files["strategy"], "--job", files["job"]).stdout


def test_tensors_too_small_for_their_compressor_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    signs = Choice(parse_option("comp@offload > flat.allgather > dec"), CompressorSpec.parse("efsignsgd"))
    Strategy.uniform([TensorSpec("large", (1000,)), TensorSpec("small", (4,))], Cluster(2, 1), signs).save(path)
    for command in ("explain", "validate"):
        body = printed(espresso(command, path, "--json"))
        assert (body["num_tensors"], body["num_compressed"], body["num_offloaded"]) == (2, 1, 1)


# -- what users get wrong ----------------------------------------------------------------------------


def test_missing_and_malformed_files(files: dict[str, Path], tmp_path: Path) -> None:
    none, broken = tmp_path / "none.json", tmp_path / "broken.json"
    broken.write_text("{")
    search = ("-c", "dgc:ratio=0.01")
    refused(espresso("search", none, *search), str(none), "no such file")
    refused(espresso("search", broken, *search), str(broken), "not a JSON file")
    refused(espresso("search", tmp_path, *search), str(tmp_path), "is a directory")
    refused(
        espresso("search", files["strategy"], *search),
        str(files["strategy"]),
        "this is a strategy file, and a job file is wanted",
    )
    refused(espresso("explain", files["job"]), "this is a job file, and a strategy file is wanted")
    refused(espresso("explain", none), "no such file")
    refused(espresso("simulate", none, files["strategy"]), str(none))
    refused(espresso("simulate", files["job"], none), str(none))
    refused(espresso("compare", broken, *search), "not a JSON file")
    refused(espresso("validate", none), "no such file")


def test_wrong_keys_are_named(files: dict[str, Path], tmp_path: Path) -> None:
    job = edited(files["job"], tmp_path, bandwidth=3)
    refused(espresso("search", job, "-c", "dgc"), str(job), "'bandwidth'")
    job = edited(files["job"], tmp_path, costs=None)
    refused(espresso("search", job, "-c", "dgc"), "lacks the key 'costs'")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"speed": 1}, "unknown key 'speed'"),
        ({"fingerprint": "sha256:0"}, "fingerprint"),
        ({"schema_version": 99}, "schema_version 99"),
        ({"cluster": None}, "lacks the key 'cluster'"),
        (
            {"tensors": [{"name": "a", "shape": [4], "dtype": "float32", "option": "x", "compressor": "none"}]},
            "'x'",
        ),
    ],
)
def test_invalid_strategies_fail_with_the_reason(
    files: dict[str, Path], tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    path = edited(files["strategy"], tmp_path, **changes)
    refused(espresso("validate", path), str(path), named)
    result = espresso("validate", path, "--json")
    assert result.exit_code == 1
    body = json.loads(result.stdout)
    assert body["valid"] is False
    assert named in body["error"]


def test_strategy_of_another_model_does_not_fit(files: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    argv = ("--nodes", "2", "--ranks-per-node", "2", "--cluster", "pcie-25g", "-o", other)
    assert espresso("job", "vgg16", *argv).exit_code == 0
    refused(espresso("validate", files["strategy"], "--job", other), "tensor '")
    refused(espresso("simulate", other, files["strategy"]), "tensor '")
    wide = tmp_path / "wide.json"
    argv = ("--nodes", "4", "--ranks-per-node", "2", "--cluster", "pcie-25g", "-o", wide)
    assert espresso("job", "lstm", *argv).exit_code == 0
    refused(espresso("validate", files["strategy"], "--job", wide), "4 nodes")


@pytest.mark.parametrize(("spec", "named"), [("zip", "'zip'"), ("dgc:rate=1", "'rate'")])
def test_strategy_with_an_unknown_compressor_is_invalid(
    files: dict[str, Path], tmp_path: Path, spec: str, named: str
) -> None:
    body = json.loads(files["strategy"].read_text())
    row = next(row for row in body["tensors"] if row["compressor"] != "none")
    row["compressor"] = spec
    path = tmp_path / "zip.json"
    path.write_text(json.dumps(body))
    refused(espresso("validate", path), row["name"], named)
    refused(espresso("explain", path), row["name"], named)
    refused(espresso("simulate", files["job"], path), row["name"], named)
    refused(espresso("search", files["job"], "-c", "dgc:ratio=0.01", "--from", path), row["name"], named)


def test_a_job_with_costs_for_no_compressor_of_ours_says_so(files: dict[str, Path], tmp_path: Path) -> None:
    body = json.loads(files["job"].read_text())
    for row in body["costs"]["compute"]:
        row["spec"] = row["spec"].replace("dgc", "Foo")
    path = tmp_path / "foo.json"
    path.write_text(json.dumps(body))
    for command in ("search", "compare", "what-if"):
        refused(espresso(command, path, "-c", "auto"), "the job has costs for Foo", "'Foo' is not a compressor id")


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("zip", "no compressor 'zip'"),
        ("dgc:ration=1", "'ration'"),
        ("dgc:ratio", "key=value"),
        ("dgc:ratio=7", "7"),
    ],
)
def test_wrong_compressors(files: dict[str, Path], spec: str, named: str) -> None:
    for command in ("search", "compare"):
        refused(espresso(command, files["job"], "-c", spec), f"--compressor {spec}", named, status=2)


def test_compressor_without_costs_in_the_job(files: dict[str, Path]) -> None:
    refused(espresso("search", files["job"], "-c", "int8"), "no costs for compressor 'int8'", "dgc")


def test_compressors_whose_error_nobody_measured_are_searched_where_error_does_not_count(tmp_path: Path) -> None:
    """The job of a live run says what its own compressors owe; costs of another block are those of the compressor."""
    path = tmp_path / "job.json"
    owed = {spec: {"*": 1.5} for spec in ("efsignsgd", "efsignsgd:block=64")}
    sensitivity = {"schema_version": 1, "kind": "espresso-sensitivity", "owed": owed}
    job = ddp_job([1 << 18] * 2, [0, 3000], beta=8.0, costs=compute(2.0, 1.0))
    replace(job, meta={"sensitivity": sensitivity}).save(path)
    table = json.loads(espresso("compare", path, "-c", "efsignsgd:block=128", "--json").stdout)
    assert {"uncompressed", "chosen"} <= {row["name"] for row in table}
    found = printed(espresso("search", path, "-c", "efsignsgd:block=128", "--json"))
    assert (found["num_compressed"], found["error"]) == (2, None)
    asked = espresso("search", path, "-c", "efsignsgd:block=128", "--error-budget", "3")
    refused(asked, "the sensitivity does not say what 'efsignsgd:block=128' does")


def test_a_unit_that_no_payload_holds_is_named(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    ddp_job([1 << 31, 1 << 31], [0, 3000], costs=compute(2.0, 1.0)).save(path)
    for command in ("search", "compare", "what-if"):
        refused(espresso(command, path, "-c", "efsignsgd"), "4294967296 elements", "holds 4294967295 at most")


def test_unknown_trace_and_cluster_list_what_there_is(tmp_path: Path) -> None:
    shape = ("--nodes", "2", "--ranks-per-node", "2", "-o", tmp_path / "j.json")
    refused(espresso("job", "gpt9", "--cluster", "pcie-25g", *shape), "'gpt9'", "bert_base", "vgg16")
    refused(espresso("job", "gpt2", "--cluster", "abacus", *shape), "'abacus'", "nvlink-100g")
    assert not (tmp_path / "j.json").exists()


def test_fp16_everywhere_is_certified_where_nobody_says_what_it_owes(tmp_path: Path) -> None:
    """And what is chosen owes something, of normal numbers."""
    made = ("job", "lstm", "--nodes", "8", "--ranks-per-node", "1", "--cluster", "nvlink-100g", "-o", tmp_path / "job")
    assert espresso(*made).exit_code == 0
    found = printed(espresso("search", tmp_path / "job", "-c", "onebit", "-o", tmp_path / "strategy.json", "--json"))
    assert found["lower_bound_us"] > 0
    assert found["error"] > 0
    assert Strategy.load(tmp_path / "strategy.json").notes["gradients_owed"] == found["error"]


def test_all_of_a_live_run_are_those_that_it_had(tmp_path: Path) -> None:
    """Its job has costs of what was forced, and of what residuals are packed with, too."""
    from espresso.search.terms import AUTOMATIC

    costs = compute(2.0, 1.0) + compute(1.0, 1.0, name="bf16") + compute(3.0, 1.0, name="dgc:ratio=0.01")
    job, path = ddp_job([1 << 18] * 2, [0, 3000], beta=8.0, costs=costs), tmp_path / "job.json"
    job.save(path)
    found = printed(espresso("search", path, "-c", "auto", "--json"))
    assert set(found["compressors"]) == {"efsignsgd", "bf16", "dgc:ratio=0.01"}
    assert (found["error_budget"], found["error"] <= 2.5) == (2.5, True)
    # (A stage of a warm-up that is over, and PowerSGD where nothing can be factored, have no costs.)
    offered = "efsignsgd; powersgd:rank=8; dgc:ratio=0.25"
    replace(job, meta={"compressor": offered, **AUTOMATIC.to_meta()}).save(path)
    found = printed(espresso("search", path, "-c", "auto", "--json"))
    assert (found["compressors"], found["error_budget"]) == (["efsignsgd"], None)


@pytest.mark.parametrize(
    "argv",
    [
        ("job", "gpt2", "--nodes", "0", "--ranks-per-node", "1", "--cluster", "pcie-25g"),
        ("job", "gpt2", "--nodes", "2", "--cluster", "pcie-25g"),
        ("search", "job.json"),
        ("search", "job.json", "-c", "dgc", "--colour"),
        ("brew",),
        ("profile",),
        (),
    ],
)
def test_wrong_usage_exits_with_two(argv: tuple[str, ...]) -> None:
    result = espresso(*argv)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_outputs_are_checked_before_the_work(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("search", files["job"], "-c", "dgc:ratio=0.01", "-o")
    nowhere = tmp_path / "no" / "s.json"
    refused(espresso(*argv, nowhere), str(nowhere), "does not exist")
    refused(espresso(*argv, tmp_path), "is a folder")
    both = (files["job"], files["strategy"])
    refused(espresso("simulate", *both, "--trace", nowhere), "does not exist")
    refused(espresso("simulate", *both, "--plot", tmp_path / "p.bmp"), ".png", status=2)
    with monkeypatch.context() as without:
        without.setattr("espresso.commands._common.find_spec", lambda name: None)
        refused(espresso("simulate", *both, "--plot", tmp_path / "p.png"), "pip install matplotlib")
    # Root may write everywhere, so a folder without permission has to be pretended.
    monkeypatch.setattr(_common.os, "access", lambda path, _: path != tmp_path)
    refused(espresso(*argv, tmp_path / "s.json"), "no permission")
    assert not (tmp_path / "s.json").exists()


def test_a_write_that_fails_after_the_work_is_one_message(files: dict[str, Path]) -> None:
    full = Path("/dev/full")
    if not (full.exists() and stat.S_ISCHR(full.stat().st_mode)):
        pytest.skip("no /dev/full on this system")
    refused(espresso("search", files["job"], "-c", "dgc:ratio=0.01", "-o", full), "no space left")


def test_progress_appears_only_for_long_work(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_common, "PROGRESS_AFTER_S", 0.05)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with _common.working("Long work") as progress:
        time.sleep(0.3)
        progress.update("half", 0.5)
        time.sleep(0.2)
    seen = capfd.readouterr()
    assert "Long work" in seen.err
    assert seen.out == ""
    with _common.working("Short work"):
        pass
    assert "Short work" not in capfd.readouterr().err


def test_who_shows_a_jobs_figures_shows_the_spread_of_its_profile(files: dict[str, Path], tmp_path: Path) -> None:
    job = edited(files["job"], tmp_path, profile={"num_steps": 16, "spread": 0.12})
    strategy, said = tmp_path / "strategy.json", "profile: 16 steps, backward's spread is 12.0 %, above the 5 % of a"
    argv = ("search", job, "-c", "dgc:ratio=0.01", "-o", strategy)
    assert said in espresso(*argv).stdout
    assert said in espresso("simulate", job, strategy).stdout
    assert said in espresso("explain", strategy).stdout
    for more in (argv, ("simulate", job, strategy)):
        assert printed(espresso(*more, "--json"))["profile"] == {"num_steps": 16, "spread": 0.12}
    assert "profile:" not in espresso("simulate", files["job"], files["strategy"]).stdout


# -- profile -----------------------------------------------------------------------------------------

#: Stands in for a training script: does to the files what a registered state does.
TRAINS = """
import json, os, pathlib, sys
assert os.environ["ESPRESSO_PROFILE_ONLY"] == "1"
job = pathlib.Path(os.environ["ESPRESSO_JOB_PATH"])
assert job.is_absolute()
marker = pathlib.Path(str(job) + ".registered")
print("training")
if "register" in sys.argv: marker.write_text(json.dumps({"steps": 5, "needed": 12}))
if "measure" in sys.argv: job.write_text("{}")
if "copy" in sys.argv: job.write_text(pathlib.Path(sys.argv[-1]).read_text())
if "another" in sys.argv: job.with_name("job-2.json").write_text("{}")
sys.exit(7 if "fail" in sys.argv else 0)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    return path


KEEPS = ("profile", "-o", "job.json")

Profile = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Profile:
    """The command in this process, in the test's folder; what it runs inherits what is captured here."""
    monkeypatch.chdir(tmp_path)

    def run(*command: str | Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        argv = [*KEEPS, *options, "--", *map(str, command)]
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            get_command(app)(argv)
        told = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return subprocess.CompletedProcess(argv, ended.value.code, told.out, told.err)

    return run


def test_what_has_no_effect_is_refused(files: dict[str, Path]) -> None:
    job_file = files["job"]
    refused(espresso("search", job_file, "-c", "dgc", "--memory-points", "3"), "goes with --frontier", status=2)
    refused(espresso("search", job_file, "-c", "dgc", "--force", "*=nope"), "--force *=nope: ", status=2)
    refused(espresso("what-if", job_file, "--nodes", "1", "--rtt-ms", "5"), "no round trip between machines")


def test_profile_keeps_the_job(script: Path, tmp_path: Path) -> None:
    done = as_process(*KEEPS, "--", sys.executable, script, "register", "measure", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (done.stdout, (tmp_path / "job.json").read_text()) == ("training\n", "{}")
    assert "job written to job.json" in done.stderr
    assert not (tmp_path / "job.json.registered").exists()


def test_what_profile_says_is_next_runs(files: dict[str, Path], script: Path, tmp_path: Path, profile: Profile) -> None:
    """Also where the script asked for one compressor, and the job has costs for no other."""
    costs = json.loads(files["job"].read_text())["costs"]
    rows = [row for row in costs["compute"] if row["spec"].startswith("efsignsgd")]
    assert 0 < len(rows) < len(costs["compute"])
    measured = edited(files["job"], tmp_path, costs=costs | {"compute": rows})
    done = profile(sys.executable, script, "register", "copy", measured)
    command = shlex.split(done.stderr.partition("next: ")[2])
    assert command[:2] == ["espresso", "search"]
    assert espresso(*command[1:]).exit_code == 0
    assert (tmp_path / "strategy.json").exists()


def test_profile_json_keeps_stdout_clean(script: Path, tmp_path: Path) -> None:
    done = as_process(*KEEPS, "--json", "--", sys.executable, script, "register", "measure", cwd=tmp_path)
    assert json.loads(done.stdout) == {
        "job": str(tmp_path / "job.json"),
        "registered": True,
        "steps": 5,
        "needed": 12,
        "command_status": 0,
        "profile": None,
        "others": [],
    }
    assert "training" in done.stderr


def test_profile_says_that_a_script_never_registered(script: Path, tmp_path: Path, profile: Profile) -> None:
    done = profile(sys.executable, script)
    assert done.returncode == 3
    assert "never called espresso.register" in done.stderr
    assert "Traceback" not in done.stderr
    body = json.loads(profile(sys.executable, script, options=("--json",)).stdout)
    assert body["registered"] is False
    assert body["job"] is None


def test_profile_is_not_fooled_by_what_an_earlier_run_left(script: Path, tmp_path: Path, profile: Profile) -> None:
    (tmp_path / "job.json").write_text("old")
    (tmp_path / "job.json.registered").write_text('{"steps": 99, "needed": 12}')
    assert profile(sys.executable, script).returncode == 3
    assert (tmp_path / "job.json").read_text() == "old"
    assert profile(sys.executable, script, "register", "measure").returncode == 0


def test_profile_says_which_further_jobs_are_of_this_run(script: Path, tmp_path: Path, profile: Profile) -> None:
    for number in (2, 3):
        (tmp_path / f"job-{number}.json").write_text("old")
    (tmp_path / "job-mine.json").write_text("old")
    done = profile(sys.executable, script, "register", "measure", "another", options=("--json",))
    assert json.loads(done.stdout)["others"] == [str(tmp_path / "job-2.json")]
    assert f"another model's job written to {tmp_path / 'job-2.json'}" in done.stderr
    assert f"{tmp_path / 'job-3.json'} is not of this run" in done.stderr
    assert "job-mine" not in done.stderr
    assert (tmp_path / "job-3.json").read_text() == "old"


def test_profile_says_that_training_was_too_short(script: Path, tmp_path: Path, profile: Profile) -> None:
    done = profile(sys.executable, script, "register")
    assert done.returncode == 4
    assert "before the 12 steps that measuring needs (it made 5); train" in done.stderr


def test_profile_says_why_a_script_that_registered_measured_nothing(
    script: Path, tmp_path: Path, profile: Profile
) -> None:
    (tmp_path / "alone.py").write_text(
        "import torch, espresso\nmodel = torch.nn.Linear(4, 4)\nstate = espresso.register(model)\n"
        "model(torch.ones(4)).sum().backward()\nprint('trained')\n"
    )
    done = profile(sys.executable, "alone.py")
    assert (done.returncode, done.stdout) == (4, "trained\n")
    assert "nothing was measured: one process without DDP" in done.stderr


def test_profile_passes_the_exit_status_on(script: Path, tmp_path: Path, profile: Profile) -> None:
    assert profile(sys.executable, script, "fail").returncode == 7
    done = profile(sys.executable, script, "register", "measure", "fail")
    assert done.returncode == 7
    assert "job written" in done.stderr
    killed = profile(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == 128 + 9


def test_profile_of_commands_that_cannot_run(script: Path, tmp_path: Path, profile: Profile) -> None:
    done = profile("no-such-command-anywhere")
    assert (done.returncode, done.stderr) == (127, "error: no-such-command-anywhere: command not found\n")
    done = profile(f"./{script.name}", "register")
    assert done.returncode == 126
    assert f"did you mean: python ./{script.name}" in done.stderr
    refused(espresso("profile", "-o", tmp_path / "no" / "job.json", "--", "true"), "does not exist")


def test_profile_needs_no_dashes_and_takes_the_commands_options(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert espresso("profile", sys.executable, "-u", script.name, "register", "measure").exit_code == 0
    assert (tmp_path / "job.json").exists()


def train_for_real(rank: int) -> list[str]:
    """Two models' steps; what was warned of."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from espresso.live.register import register
    from tests.ddp import Said

    layers = [torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
    critic = DistributedDataParallel(torch.nn.Linear(64, 8))
    with Said() as said:
        states = [register(each, compressor="efsignsgd", ranks_per_node=1) for each in (model, critic)]
        for _ in range(30):
            model(torch.randn(8, 64)).square().mean().backward()
            critic(torch.randn(8, 64)).square().mean().backward()
        assert states[0].metrics()["espresso/tensors_compressed"] == 0
        for state in states:
            state.close()
    return said.warnings


@pytest.mark.slow
def test_profile_of_a_real_training_script_feeds_the_search(script: Path, tmp_path: Path, profile: Profile) -> None:
    """On two ranks with what the command tells a script; the command on one that leaves the same job behind.

    Both in one, through torchrun: the tutorial's commands, which test_docs.py runs.
    """
    real = tmp_path / "real.json"
    told_ranks = {"ESPRESSO_PROFILE_ONLY": "1", "ESPRESSO_JOB_PATH": str(real)}
    warnings = run_ranks(train_for_real, 2, environment=told_ranks)[0].value
    assert any("another model's job is written to" in each for each in warnings)
    assert len(Job.load(tmp_path / "real-2.json").tensors) == 2
    marker = json.loads((tmp_path / "real.json.registered").read_text())
    assert marker["steps"] >= marker["needed"] > 0
    done = profile(sys.executable, script, "register", "copy", real, options=("--json",))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["registered"] is True
    job = json.loads((tmp_path / "job.json").read_text())
    assert told["profile"] == job["profile"]
    assert 8 <= job["profile"]["num_steps"] <= 16
    assert f"profiled {job['profile']['num_steps']} steps, backward's spread is " in done.stderr
    assert (job["mode"], len(job["tensors"]), job["cluster"]["num_nodes"]) == ("ddp", 4, 2)
    assert len(job["buckets"]) > 1
    body = printed(espresso("search", tmp_path / "job.json", "-c", "efsignsgd", "--json"))
    assert body["num_tensors"] == 4
    assert body["predicted_us"] <= body["uncompressed_us"]


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(42))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(43))
open("ready", "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 42), (signal.SIGTERM, 43)])
def test_profile_leaves_signals_to_the_command(tmp_path: Path, number: signal.Signals, status: int) -> None:
    argv = [sys.executable, "-m", "espresso", "profile", "--", sys.executable, "-c", WAITS]
    with subprocess.Popen(argv, cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert "Traceback" not in err


# -- links -------------------------------------------------------------------------------------------


def test_links_without_a_launcher_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    refused(espresso("links"), "no launcher", "torchrun", status=2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    refused(espresso("links"), "one rank has no links", status=2)
    monkeypatch.setenv("RANK", "5")
    refused(espresso("links"), "RANK=5", status=2)


def test_links_between_ranks_that_disagree_or_do_not_come_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    for error in (DisagreementError("rank 1 runs another version"), LostRankError("rank 1 did not come")):

        def measure(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("espresso.commands.links._measure", measure)
        refused(espresso("links"), str(error))


def links_on(rank: int, *argv: str) -> tuple[int, str, str]:
    """The command on one of several ranks: its exit status, and what it printed."""
    result = espresso("links", *argv)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_links_of_two_ranks_are_printed_once(tmp_path: Path) -> None:
    """As torchrun starts them."""
    argv = ("--json", "--ranks-per-node", "1", "-o", str(tmp_path / "links.json"))
    (status, out, err), other = (outcome.value for outcome in run_ranks(links_on, 2, *argv, init=False))
    assert status == 0, err
    assert other == (0, "", "")
    body = json.loads(out)
    assert (body["num_nodes"], body["ranks_per_node"]) == (2, 1)
    assert {"allreduce", "allgather", "all_to_all"} <= {row["routine"] for row in body["links"]}
    assert all(row["points"] and row["alpha_us"] >= 0 for row in body["links"])
    assert json.loads((tmp_path / "links.json").read_text())["measured"] == body
    made = espresso(
        "job", "lstm", "--nodes", "2", "--ranks-per-node", "1", "--cluster", tmp_path / "links.json",
        "-o", tmp_path / "job.json",
    )  # fmt: skip
    assert made.exit_code == 0, made.stderr


def test_search_within_budgets_and_constraints(tmp_path: Path) -> None:
    from espresso.model.presets import job_from_trace

    job, strategy, picture = tmp_path / "job.json", tmp_path / "strategy.json", tmp_path / "frontier.png"
    job_from_trace("lstm", 2, 1, "pcie-25g").save(job)
    names = [tensor.name for tensor in job_from_trace("lstm", 2, 1, "pcie-25g").tensors]
    limits = ["--keep-exact", names[0], "--force", f"{names[1]}=fp16", "--forbid", "*all_to_all*"]
    limits += ["--devices", "training", "--most-compressions", "1"]
    budgets = ["--error-budget", "2.5", "--residual-budget-mb", "400"]
    body = printed(espresso("search", job, "-c", "auto", *limits, *budgets, "-o", strategy, "--json"))
    found = Strategy.load(strategy)
    assert found.choices[names[0]].compressor.name == "none"
    assert str(found.choices[names[1]].compressor) == "fp16"
    assert {"dgc", "efsignsgd", "fp16"} <= set(body["compressors"])
    for name in names:
        assert "all_to_all" not in str(found.choices[name].option)
        assert found.choices[name].option.num_compressions <= 1
        assert not found.choices[name].option.uses_offload
    assert 0 < body["error"] <= body["error_budget"] == 2.5
    assert 0 < body["residual_bytes"] <= 4e8
    assert body["constraints"]["keep_exact"] == [names[0]]
    assert body["lower_bound_us"] <= body["predicted_us"]
    # What was asked is in the file, and replanning keeps to it.
    again = printed(espresso("search", job, "-c", "efsignsgd", "-c", "fp16", "--from", strategy, "--json"))
    assert again["constraints"] == body["constraints"]
    assert again["error_budget"] == 2.5
    # An option takes the place of that one term.
    replanned = ("search", job, "-c", "efsignsgd", "-c", "fp16", "--from", strategy, "--json")
    again = printed(espresso(*replanned, "--residual-budget-mb", "300", "--most-compressions", "0"))
    assert again["constraints"] == {**body["constraints"], "most_compressions": 0}
    assert (again["error_budget"], again["residual_budget_mb"]) == (2.5, 300)
    assert printed(espresso(*replanned, "--no-automatic"))["constraints"] == {}
    refused(espresso(*replanned, "--bucket-caps"), "leave --bucket-caps out", status=2)
    told = espresso("explain", strategy)
    assert "gradients_owed: " in told.output
    assert "residual_mb: " in told.output
    drawn = espresso(
        "search", job, "-c", "efsignsgd", "--frontier", "3", "--memory-points", "2", "--plot", picture
    )  # fmt: skip
    assert "residuals" in drawn.output
    assert picture.stat().st_size > 1000
    told = espresso("search", job, "-c", "efsignsgd", "--automatic")
    assert "vectors of up to 16384 elements stay exact" in " ".join((told.output + told.stderr).split())
    slip = espresso("search", job, "-c", "efsignsgd", "--keep-exact", "nosuch.*")
    assert f"no tensor of this model is called 'nosuch.*'; the first is {names[0]!r}" in slip.stderr
    slip = espresso("search", job, "-c", "efsignsgd", "--forbid", "all_to_all", "--forbid", "*allgather*")
    assert "is 'all_to_all': to forbid it does nothing" in " ".join(slip.stderr.split())
    assert "*allgather*" not in slip.stderr
    refused(espresso("search", job, "-c", "efsignsgd", "--force", "head=auto"), "--force head=auto: ", status=2)
    refused(espresso("search", job, "-c", "efsignsgd", "--plot", picture), "--frontier", status=2)
    refused(espresso("search", job, "-c", "efsignsgd", "--force", "head"), "NAME=COMPRESSOR", status=2)
    refused(espresso("search", job, "-c", "efsignsgd", "--devices", "moon"), "'moon' is not one of", status=2)
