"""Sphinx configuration. Figures and tables made from the code and from results are generated at each build."""

import re
import sys
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import generate

from ucc_hetero.bench.report import write_archives

HERE = Path(__file__).resolve().parent

project = "ucc_hetero"
author = "ucc_hetero authors"
copyright = "2026, ucc_hetero authors"
version = release = installed_version("ucc-hetero")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # signatures have them
autodoc_member_order = "bysource"
autodoc_mock_imports = [] if find_spec("torch") else ["torch"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
exclude_patterns = ["_build", "_generated"]
#: Its content is copied next to the pages.
html_extra_path = ["figures"]
html_theme = "furo"
html_title = f"ucc_hetero {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]


def _made(app: Any, config: Any) -> None:
    generate.write(HERE / "_generated")
    write_archives(sorted((HERE.parent / "benchmarks" / "results").glob("*.tar.xz")), HERE / "figures")


def _links(app: Any, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Turn file names of pages in docstrings into links."""
    lines[:] = [re.sub(r"docs/([\w-]+)\.md", r":doc:`\1`", line) for line in lines]


def setup(app: Any) -> None:
    """Called by Sphinx before it reads the pages."""
    app.connect("config-inited", _made)
    app.connect("autodoc-process-docstring", _links)
