"""Sphinx: the guides and the reference as a site, `make docs`."""

from __future__ import annotations

import torch_xla

project = "torch_xla"
copyright = "the torch_xla authors"
version = release = torch_xla.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"torch_xla {release}"
copybutton_exclude = ".linenos, .gp, .go"  # of a shell or Python session what is typed, without what it prints

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# Signatures keep their names; the docstrings say what the arguments are. Types of other projects are not looked up.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!torch_xla\.).*"), ("py:.*", r"torch_xla\.(\w+\.)*_\w+.*")]
