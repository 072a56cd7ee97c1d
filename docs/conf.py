"""Settings of the documentation site: `make docs`."""

from typing import Any

import pufferfish

project = "Pufferfish"
author = "the Pufferfish contributors"
version = release = pufferfish.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3

# Docstrings put code between single backticks. Where it names something documented here, it becomes a link.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # not those of torch
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Every type in a signature must be documented here or belong to another project; nothing is fetched to check the latter.
nitpicky = True
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    (
        "py:.*",
        r"pufferfish\.(distributed|local\.fragments|compression\.(engine|exchange))\..*",
    ),  # internal
    ("py:.*", r"pufferfish\..*\.OptimizersT"),
    (
        "py:.*",
        r"(torch|nn|dist|optim|np|numpy|collections|typing|types|pathlib|transformers|lightning|accelerate)\..*",
    ),
]

html_theme = "furo"
html_static_path, html_css_files = ["_static"], ["site.css"]
highlight_language = "none"  # of blocks without a language: commands
pygments_style, pygments_dark_style = "default", "github-dark"  # both colour diffs
html_title = f"Pufferfish {version}"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False


def plain_attributes(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from reading "Seconds: of the whole step" in an attribute's docstring as a type and a text."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # an empty comment


def default_factories(
    app: Any, what: str, name: str, obj: object, options: object, arguments: str, returned: str
) -> Any:
    """Make the signature of a dataclass with default factories valid Python, so that Sphinx can format it."""
    return (arguments and arguments.replace("<factory>", "..."), returned)


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", default_factories)
    app.connect("autodoc-process-docstring", plain_attributes, priority=100)  # napoleon has 500
