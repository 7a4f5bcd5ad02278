"""``espresso profile -- torchrun … train.py``: run a training script and keep what was measured.

environment   ESPRESSO_PROFILE_ONLY=1, ESPRESSO_JOB_PATH=<absolute path>
the state     leaves <job path>.registered when it is registered ({"steps": n, "needed": m}),
              and the job itself when it has measured enough; training goes on uncompressed
afterwards    no marker: never registered; a marker but no job: too few steps
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from espresso.commands._common import (
    ExitStatus,
    JsonFlag,
    UserError,
    check_output,
    emit_json,
    fail,
    next_step,
    say,
    user_errors,
)
from espresso.strategies import FormError
from espresso.strategies.fields import load, read_as

if TYPE_CHECKING:
    from espresso.model.job import Profile

EXAMPLE = "espresso profile -- torchrun --nproc-per-node 2 train.py --epochs 1"


@user_errors
def profile(
    command: Annotated[
        list[str] | None, typer.Argument(help="The command that trains, after --.", show_default=False)
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The job file to write.")] = Path("job.json"),
    json_output: JsonFlag = False,
) -> None:
    """Run your own training command once, uncompressed, and keep what was measured as a job.

    The script must call espresso.register(model, …). Exit status: the command's own where that is not zero;
    3 if the script never registered, 4 if it stopped before enough steps, 127 if there is no such command.
    """
    if not command:
        raise UserError(f"give the command that trains, for example: {EXAMPLE}", ExitStatus.USAGE)
    check_output(output)
    job_path = output.absolute()
    marker = job_path.with_name(job_path.name + ".registered")
    marker.unlink(missing_ok=True)
    before = {path: _identity(path) for path in (job_path, *_of_other_models(job_path))}
    try:
        status = _run(command, job_path, quiet_stdout=json_output)
        registered = _read_marker(marker)
    finally:
        marker.unlink(missing_ok=True)
    written = _identity(job_path) not in (None, before[job_path])
    others = _of_other_models(job_path)
    new = [path for path in others if _identity(path) != before.get(path)]
    found = _profile_of(job_path) if written else None
    if json_output:
        more = {"profile": None if found is None else asdict(found), "others": list(map(str, new))}
        emit_json({**_summary(job_path, written, registered, status), **more})
    for path in others:
        say(f"another model's job written to {path}" if path in new else f"{path} is not of this run")
    if found is not None:
        say(f"profiled {found}")
    _report(output, written, registered, status, command[0])


def _run(command: Sequence[str], job_path: Path, *, quiet_stdout: bool) -> int:
    """Run the command with our variables; its exit status, 128 + n where signal n ended it.

    With ``quiet_stdout`` what it prints goes to stderr, since stdout is to hold one JSON object.
    """
    env = {**os.environ, "ESPRESSO_PROFILE_ONLY": "1", "ESPRESSO_JOB_PATH": str(job_path)}
    sys.stdout.flush()
    try:
        child = subprocess.Popen(
            [_find(command[0]), *command[1:]], env=env, stdout=sys.stderr.fileno() if quiet_stdout else None
        )
    except FileNotFoundError:
        raise UserError(f"{command[0]}: command not found", ExitStatus.NOT_FOUND) from None
    except PermissionError:
        hint = f"; did you mean: python {command[0]}" if command[0].endswith(".py") else ""
        raise UserError(f"{command[0]}: not an executable file{hint}", ExitStatus.NOT_EXECUTABLE) from None
    except OSError as error:
        raise UserError(f"{command[0]}: cannot be run ({error.strerror})", ExitStatus.NOT_EXECUTABLE) from None
    with _signals_go_to(child):
        code = child.wait()
    return 128 - code if code < 0 else code


def _find(name: str) -> str:
    """The program: on PATH, else beside our own interpreter (a virtual environment that is not activated)."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent)) or name


@contextmanager
def _signals_go_to(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """While the command runs, signals are its business; we wait for what it makes of them."""

    def forward(number: int, _frame: FrameType | None) -> None:
        # Ctrl-C in a terminal has reached the command already, as a member of the foreground group.
        if number != signal.SIGINT or not _is_in_foreground():
            child.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Whether a terminal has this process group in its foreground, wherever stdin comes from."""
    with suppress(OSError), open("/dev/tty", "rb", buffering=0) as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def _identity(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written again; None if it is not there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _of_other_models(job_path: Path) -> list[Path]:
    """What lies beside a job, numbered as further models' jobs are."""
    numbered = re.compile(rf"{re.escape(job_path.stem)}-\d+{re.escape(job_path.suffix)}")
    return sorted(path for path in job_path.parent.iterdir() if numbered.fullmatch(path.name))


@dataclass(frozen=True)
class Marker:
    """What the state leaves when it is registered; as it is by default where that cannot be read."""

    steps: int = 0
    needed: int = 0
    writes_here: bool = True
    why_not: str = ""


def _read_marker(path: Path) -> Marker | None:
    """The marker; None if the script never registered."""
    try:
        return load(path, lambda body: read_as(Marker, body, "the marker"), FormError)
    except FileNotFoundError:
        return None
    except FormError:
        return Marker()


def _profile_of(path: Path) -> "Profile | None":
    """A job's; None where it has none, or is none of ours."""
    from espresso.model.job import Job, JobError

    with suppress(JobError):
        return Job.load(path).profile
    return None


def _summary(path: Path, written: bool, registered: Marker | None, status: int) -> dict[str, Any]:
    return {
        "job": str(path) if written else None,
        "registered": registered is not None or written,
        "steps": None if registered is None else registered.steps,
        "needed": None if registered is None else registered.needed,
        "command_status": status,
    }


def _report(output: Path, written: bool, registered: Marker | None, status: int, program: str) -> None:
    if written:
        say(f"job written to {output}; {next_step(output)}")
    if status:
        typer.echo(f"error: {program} ended with exit status {status}", err=True)
        raise typer.Exit(status)
    if written:
        return
    if registered is None:
        fail(
            "the script never called espresso.register(model, …), so nothing was measured;"
            " add that call after DistributedDataParallel(…)",
            ExitStatus.NEVER_REGISTERED,
        )
    if registered.why_not:
        fail(f"nothing was measured: {registered.why_not}", ExitStatus.TOO_FEW_STEPS)
    if not registered.writes_here and registered.steps >= registered.needed:
        say("this node does not run rank 0; the job is written where 'espresso profile' runs on rank 0's node")
        return
    made = f" (it made {registered.steps})" if registered.steps else ""
    fail(
        f"the script registered but ended before the {registered.needed or 'few'} steps that measuring"
        f" needs{made}; train for longer",
        ExitStatus.TOO_FEW_STEPS,
    )
