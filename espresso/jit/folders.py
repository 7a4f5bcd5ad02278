"""Folders for compiled code where the usual ones cannot be written."""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger("espresso")


def private_folder() -> Path:
    """A folder in the temporary one that all processes of this user on this machine share, and nobody else can enter.

    What lies there is loaded as code, so that a folder which is another user's, or open to others, is not used.

    Raises:
        OSError: nothing can be written, or the folder is not ours alone.
    """
    folder = Path(tempfile.gettempdir()) / f"espresso-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not is_ours or stat.S_IMODE(found.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(errno.EACCES, "it is not a folder of this user alone", str(folder))
    return folder


def user_folder(variable: str, *parts: str) -> Path:
    """The folder that an environment variable names, else one below the user's home.

    Raises:
        OSError: there is neither, or it cannot be written.
    """
    folder = Path(os.environ.get(variable) or os.path.join(os.path.expanduser("~"), *parts))
    if not folder.is_absolute():  # a user without a home
        raise FileNotFoundError(errno.ENOENT, "no home folder", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    return folder


@cache
def warn_once(message: str) -> None:
    """Log a warning, the first time."""
    logger.warning(message)
