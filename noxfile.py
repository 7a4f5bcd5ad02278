"""The suite over versions of Python and PyTorch: ``nox --list``, ``nox -s tests``.

What cannot be installed where it runs is skipped by name. ``PIP_ARGS`` is passed to pip, for example an index with CPU
builds of PyTorch.
"""

import os
import shlex

import nox

nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False

TORCH = {"oldest": "torch==2.11.*", "pinned": "torch==2.13.*", "newest": "torch"}


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("torch", list(TORCH))
def tests(session: nox.Session, torch: str) -> None:
    """All tests; arguments after ``--`` go to pytest."""
    more = shlex.split(os.environ.get("PIP_ARGS", ""))
    try:
        session.install(*more, TORCH[torch])
    except nox.command.CommandFailed:
        session.skip(f"{TORCH[torch]} cannot be installed here for Python {session.python}")
    pins = [] if torch == "newest" else ["--constraint", _constraints(session)]
    session.install(*more, *pins, "--editable", ".[test]")
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    session.run("python", "-m", "pytest", *(session.posargs or ["-n", "3", "--dist", "loadfile"]))


def _constraints(session: nox.Session) -> str:
    """The pins without PyTorch's own."""
    path = os.path.join(session.create_tmp(), "constraints.txt")
    with open("constraints.txt") as pins, open(path, "w") as file:
        file.writelines(line for line in pins if not line.startswith("torch=="))
    return path
