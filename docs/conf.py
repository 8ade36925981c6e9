"""The site of the documentation: `make docs` builds it, and anything that leads nowhere ends the build."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "src")]

project = "qkform"
author = "The qkform authors"
copyright = "The qkform authors, Apache-2.0"
version = release = version_of("qkform")

extensions = ["myst_parser", "sphinx.ext.autodoc", "docstrings"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "qkform"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["names.css"]

myst_heading_anchors = 4  # the anchors that the pages have where their Markdown is shown as it is

autodoc_member_order = "alphabetical"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
autodoc_default_options = {"members": True, "imported-members": True}
add_module_names = False
maximum_signature_line_length = 90
python_use_unqualified_type_names = True
