"""Sphinx configuration. The pages of all figures are made from the committed results at each build."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
from figures import write_pages

project = "ucc_hetero"
author = "ucc_hetero authors"
copyright = "2026, ucc_hetero authors"
version = release = installed_version("ucc-hetero")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "description"
exclude_patterns = ["_build"]
#: Its content goes beside the pages.
html_extra_path = ["figures"]
html_theme = "alabaster"


def _figures(app: Any, config: Any) -> None:
    here = Path(__file__).parent
    write_pages(sorted((here.parent / "benchmarks" / "results").glob("*.tar.xz")), here / "figures")


def setup(app: Any) -> None:
    """Called by Sphinx before it reads the pages."""
    app.connect("config-inited", _figures)
