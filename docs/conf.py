"""Sphinx configuration."""

from importlib.metadata import version as installed_version

project = "ucc_hetero"
author = "ucc_hetero authors"
copyright = "2026, ucc_hetero authors"
version = release = installed_version("ucc-hetero")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "description"
exclude_patterns = ["_build"]
html_theme = "alabaster"
