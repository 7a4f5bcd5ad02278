"""What every sub-command shares: output, progress, exit statuses and the wording of errors."""

import functools
import importlib
import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import Console

from espresso.show.gantt import IMAGE_FORMATS
from espresso.strategies import CompressorSpec

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from espresso.model.job import Job

AUTO = "auto"
"""In place of a compressor."""

PROGRESS_AFTER_S = 2.0
"""Work shorter than this shows no progress bar."""

PIPED_WIDTH = 160
"""Columns of tables that go to a file or a pipe, where there is no terminal to ask."""

P = ParamSpec("P")
R = TypeVar("R")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


# readable=False: we read the files ourselves, so that whatever is wrong with them has one exit status.
JobFile = Annotated[Path, typer.Argument(help="The job file.", show_default=False, readable=False)]
StrategyFile = Annotated[Path, typer.Argument(help="The strategy file.", show_default=False, readable=False)]
CompressorOption = Annotated[
    list[str],
    typer.Option(
        "--compressor",
        "-c",
        help="efsignsgd, dgc:ratio=0.01, ... (docs/choosing.md lists all). Given more than once, every tensor takes one"
        " of them; auto: one of those that the job has costs for.",
        show_default=False,
    ),
]


def picture_option(what: str) -> Any:
    """``--plot``, which draws ``what``."""
    return typer.Option("--plot", help=f"Draw {what} (png, pdf or svg).", show_default=False)


class ExitStatus(IntEnum):
    """What the command's exit status means; beside these, ``profile`` passes on its command's own."""

    FAILED = 1
    USAGE = 2
    NEVER_REGISTERED = 3
    TOO_FEW_STEPS = 4
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127


@contextmanager
def usage_errors() -> Iterator[None]:
    """What is refused in here came from the command line."""
    from espresso.strategies import FormError

    try:
        yield
    except FormError as error:
        raise UserError(str(error), ExitStatus.USAGE) from None


class UserError(Exception):
    """Something the user can put right. Shown as one line, without a traceback."""

    def __init__(self, message: str, status: ExitStatus = ExitStatus.FAILED) -> None:
        super().__init__(message)
        self.status = status


def user_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turn errors that are the user's to put right into one message on stderr and an exit status."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        from espresso.strategies import FormError

        try:
            return command(*args, **kwargs)
        except UserError as error:
            fail(str(error), error.status)
        except FormError as error:
            fail(str(error))
        except BrokenPipeError:
            raise  # the reader of our output has gone; typer ends quietly
        except OSError as error:
            fail(describe_os_error(error))

    return wrapped


def fail(message: str, status: ExitStatus = ExitStatus.FAILED) -> NoReturn:
    """Print ``error: message`` on stderr and leave."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(int(status))


def describe_os_error(error: OSError) -> str:
    """``path: what is wrong``, as shells word it."""
    reason = (error.strerror or str(error)).lower()
    return f"{error.filename}: {reason}" if error.filename is not None else reason


def out() -> Console:
    """The console of results: stdout, as it is at this moment."""
    return _console(sys.stdout.isatty(), stderr=False)


def err() -> Console:
    """The console of progress and remarks: stderr."""
    return _console(sys.stderr.isatty(), stderr=True)


def _console(is_terminal: bool, *, stderr: bool) -> Console:
    width = None if is_terminal or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False)


def emit_json(body: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
    """Print one JSON object, or list of objects, on stdout, on one line."""
    typer.echo(json.dumps(body, allow_nan=False))


def say(message: str) -> None:
    """A remark for people, on stderr, so that stdout stays what was asked for."""
    typer.echo(message, err=True)


class Progress:
    """A line on stderr that appears once the work has lasted two seconds, and goes away with it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said: dict[str, Any] = {"description": what}
        self._bar: Bar | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Show the line from now on. (Its parts are imported here: most commands are done before.)"""
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
        bar = Bar(*columns, console=err(), transient=True)
        with self._lock:
            bar.add_task(**{"total": None, **self._said})
            bar.start()
            self._bar = bar

    def stop(self) -> None:
        """Take the line away, if it was shown."""
        if self._bar is not None:
            self._bar.stop()

    def describe(self, now: str) -> None:
        """Say what is being done at the moment."""
        self._say(description=f"{self._what}: {now}")

    def update(self, now: str, fraction: float) -> None:
        """Say what is being done and how much of it is done, 0 to 1."""
        self._say(description=f"{self._what}: {now}", total=1.0, completed=fraction)

    def _say(self, **fields: Any) -> None:
        with self._lock:
            self._said |= fields
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], **fields)


@contextmanager
def working(what: str, *, shown: bool = True, searches: bool = False) -> Iterator[Progress]:
    """Show on stderr that something long is going on, unless it is over within two seconds.

    Args:
        searches: the work needs the search's kernels: loading them is a part of it, and compiles the first time.
    """
    progress = Progress(what)
    timer = threading.Timer(PROGRESS_AFTER_S, progress.start)
    timer.daemon = True
    if shown:
        timer.start()
    try:
        if searches:
            _skip_blas()
        yield progress
    finally:
        if shown:
            timer.cancel()
            timer.join()
        progress.stop()


def parse_compressors(texts: Sequence[str]) -> tuple[CompressorSpec, ...]:
    """The specs, checked against the registry of compressors.

    Raises:
        UserError: not of the form name:key=value, an unknown compressor, an unknown or wrong parameter.
    """
    return tuple(check_compressor(text, f"--compressor {text}") for text in texts if text != AUTO)


def check_compressor(text: str, where: str, status: ExitStatus = ExitStatus.USAGE) -> CompressorSpec:
    """The spec, checked against the registry of compressors; ``where`` begins the error."""
    from espresso.compressors import create

    try:
        spec = CompressorSpec.parse(text)
        create(spec)
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: {error}", status) from None
    return spec


def compressors_of(texts: Sequence[str], job: "Job") -> tuple[CompressorSpec, ...]:
    """As :func:`parse_compressors`; with ``auto`` also those of the run that measured the job, or all that have costs.

    Raises:
        UserError: as there.
    """
    from espresso.model.job import OFFERED

    specs = parse_compressors(texts)
    if AUTO in texts:
        where = f"--compressor {AUTO}: the job has costs for"
        of_job = [cost.spec for cost in job.costs.compute]
        if isinstance(offered := job.meta.get(OFFERED), str):  # there are costs of what was forced, too, and of packing
            of_job = [spec for spec in of_job if spec in offered.split("; ")]
        specs += tuple(check_compressor(text, f"{where} {text}", ExitStatus.FAILED) for text in of_job)
    return tuple(dict.fromkeys(specs))


def _skip_blas() -> None:
    """Keep Numba from loading SciPy's BLAS with its first kernel: 0.1 s, and none of ours uses it.

    Only for processes that are the command's own: Numba then compiles no linear algebra.
    """
    blas = "scipy.linalg.cython_blas"
    if blas in sys.modules:
        return
    modules: dict[str, Any] = sys.modules
    modules[blas] = None
    try:
        importlib.import_module("numba.np.arraymath")  # where Numba looks, once
    finally:
        del modules[blas]


def job_and_compressors(job: Path, texts: Sequence[str]) -> "tuple[Job, tuple[CompressorSpec, ...]]":
    """What a command that predicts is asked about. What is wrong with the compressors is said before the job is read.

    Raises:
        UserError: as :func:`parse_compressors`.
        JobError, OSError: the file.
    """
    from espresso.model.job import Job

    parse_compressors(texts)
    loaded = Job.load(job)
    return loaded, compressors_of(texts, loaded)


def draw(path: Path | None, write: Callable[..., object], *what: object) -> None:
    """Have a picture written, if one was asked for; in names a "$" begins no formula."""
    if path is not None:
        from matplotlib import rc_context

        with rc_context({"text.parse_math": False}):
            write(path, *what)
        say(f"picture written to {path}")


def next_step(job: Path) -> str:
    """What to do with a job, as a command: whatever it was measured with, there are costs for that."""
    return f"next: espresso search {shlex.quote(str(job))} --compressor {AUTO} -o strategy.json"


def check_output(path: Path | None, *endings: str) -> None:
    """Find out before the work, not after it, that a result cannot be written.

    Raises:
        UserError: no such folder, a folder itself, no permission, another ending than one of ``endings``, or nothing
            to draw a picture with.
    """
    if path is None:
        return
    folder = path.parent
    if endings and path.suffix.lower() not in endings:
        raise UserError(f"{path}: the name must end in {' or '.join(endings)}", ExitStatus.USAGE)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name a file to write")
    if not folder.is_dir():
        raise UserError(f"{path}: the folder {folder} does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"{path}: no permission to write there")
    if path.suffix.lower() in IMAGE_FORMATS and find_spec("matplotlib") is None:
        raise UserError(f"{path}: pictures need Matplotlib: python -m pip install matplotlib")
