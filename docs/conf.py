"""The site: `sphinx-build -W --keep-going -b html docs docs/_build`.

Built without a network. A warning is an error: a link that leads nowhere, a
page in no table of contents, a docstring that is no reStructuredText.
"""

import importlib.metadata
import os
import pathlib
import sys

# The source beside this folder is documented, whichever is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
# Importing the package starts no backend; were one started, it is the CPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

project = "ringjax"
author = "The ringjax authors"
copyright = author
release = importlib.metadata.version("ringjax")

extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "ringjax"

# Anchors for headings, so that a page can link to a section of another.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# Docstrings are Google's style; shapes are in them, and the annotations of
# jaxtyping print as long as a page.
napoleon_numpy_docstring = False
# Of a NamedTuple, which has no attributes to assign.
napoleon_custom_sections = [("Fields", "params_style")]
# Members list attributes; twice would be a warning.
napoleon_use_ivar = True
autodoc_typehints = "none"
autodoc_member_order = "groupwise"
# Backquotes in docstrings are code, as in Markdown.
default_role = "code"
