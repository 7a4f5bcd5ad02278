"""The documentation's site: Markdown through MyST, the API reference from docstrings."""

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

project = "Espresso"
author = "The Espresso contributors"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_mock_imports = ["cupy", "lightning", "mpi4py", "transformers"]

html_theme = "furo"
html_title = f"Espresso {version}"
html_copy_source = False
exclude_patterns = ["_build"]
suppress_warnings = ["myst.header"]


def link_to_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Markdown outside this folder is a file for download, not a page."""
    source[0] = re.sub(r"\]\((\.\./[^)#]*\.md)\)", r"](path:\1)", source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", link_to_files)
