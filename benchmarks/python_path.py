"""Where processes that a benchmark starts find it, whatever their folder."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path() -> str:
    """PYTHONPATH with the repository before what this process was given."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
