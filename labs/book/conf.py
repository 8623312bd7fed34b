"""Settings of Sphinx for the book. `make docs` builds the site from the files of the repository."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from memlab import __version__

sys.path.insert(0, str(Path(__file__).parent))  # the book's own extensions
logging.getLogger("megatron").setLevel(logging.WARNING)  # it says at INFO what it has found

project = "memlab"
author = "The memlab developers"
version = release = __version__
root_doc = "README"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "attribute_docs",
    "executed_labs",
    "site_checks",
]
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "labs/*.md",
    "labs/*.ipynb",
    "labs/book/*.md",
    "labs/teaching/*.md",
]
exclude_patterns = ["build", ".venv", ".git", "memlab", "tests", "papermill_runs", "labs/book/contents.md"]
highlight_language = "text"  # commands, tables and trees; Python is marked as such
default_role = "literal"  # docstrings write code between single backticks

# The labs have run before: `executed_labs` puts the executed notebooks in their places.
nb_execution_mode = "off"
nb_merge_streams = True
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]  # the metrics that the last cell of a lab writes for the runner

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "memlab"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_extra_path = ["index.html"]
html_copy_source = False
html_show_search_summary = False  # the search would fetch the pages, which browsers refuse for files on disk
html_show_sphinx = False
