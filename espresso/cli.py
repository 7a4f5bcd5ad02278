"""The command line: ``espresso COMMAND``, one module of :mod:`espresso.commands` each.

Results go to stdout (with ``--json`` one JSON object and nothing else), progress and remarks to stderr.
Commands import what they need when they run, so that ``espresso --help`` stays instant.
"""

import atexit
import gc
import os
import sys
from typing import Annotated

import typer

from espresso.commands import (
    compare,
    diagnose,
    explain,
    job,
    links,
    probe,
    profile,
    search,
    simulate,
    validate,
    what_if,
)

GC_THRESHOLD = 500_000
"""New objects between two collections of the console script's process; Python's own is 700."""

app = typer.Typer(
    name="espresso",
    help="Gradient compression for PyTorch DDP and HSDP: profile a job, search a strategy, see what it does.",
    epilog="Exit status: 0 done; 1 a file is wrong, or cannot be read or written; 2 wrong usage.",
    no_args_is_help=True,
    add_completion=False,
    # Our own errors are messages; what is left is a bug, and a bug's plain traceback is what we want to see.
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from espresso import __version__

        typer.echo(f"espresso {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(job.job)
app.command()(search.search)
app.command()(explain.explain)
app.command()(validate.validate)
app.command()(simulate.simulate)
app.command()(compare.compare)
app.command("what-if")(what_if.what_if)
# The first word that is no option of ours starts the user's command, even without `--`.
app.command(context_settings={"allow_interspersed_args": False})(profile.profile)
app.command()(links.links)
app.command()(diagnose.diagnose)
app.command()(probe.probe)


def main() -> None:
    """The console script."""
    # None where it is closed, as by `>&-`: what goes there is for nobody.
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    # Imports and compiling make objects by the hundred thousand that stay; looking for rubbish among them is a
    # tenth of a short command's time, and as much again at the end.
    gc.set_threshold(GC_THRESHOLD)
    atexit.register(gc.freeze)
    app()
