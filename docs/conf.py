"""Sphinx's configuration: `make docs` makes the site of these pages and of the docstrings, in build/site."""

import compiled_fsdp

project = "compiled_fsdp"
author = "the compiled_fsdp authors"
copyright = author
version = release = compiled_fsdp.__version__

# Without intersphinx, whose inventories come over the network: the site also builds where there is none.
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "compiled_fsdp"
html_static_path = ["static"]
html_css_files = ["site.css"]

# Headings have the names that GitHub gives them, so a link works on both.
myst_heading_anchors = 4
# Pages begin with "# title" and use code blocks in languages that Pygments does not know.
suppress_warnings = ["misc.highlighting_failure"]

# Docstrings are in Google's style. Attributes stand in their class's docstring, so they are not listed again.
napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

copybutton_prompt_text = "$ "
