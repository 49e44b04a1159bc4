"""The site of the documentation: Sphinx over the Markdown files where they are, read as GitHub reads them.

make docs
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the package and the documents are of one version

import meshloom  # noqa: E402

project = "meshloom"
author = "The meshloom authors"
version = release = meshloom.__version__
for (
    name
) in meshloom.__all__:  # some are imported when they are first named, and autodoc looks for what is there
    setattr(meshloom, name, getattr(meshloom, name))

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinxarg.ext"]
root_doc = "docs/site/index"
include_patterns = [
    *("*.md", "docs/*.md", "docs/clusters/*.md", "docs/decisions/*.md", "docs/guides/*.md", "docs/site/*.md"),
    *("docs/notebooks/*.ipynb", "benchmarks/*/README.md"),
]
exclude_patterns = ["build", ".venv*", "**.ipynb_checkpoints"]

# Markdown: headings are linked to as on GitHub, and a link that leads nowhere is a warning, which is an error.
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
highlight_language = "none"
suppress_warnings = ["myst.domains"]  # that of the command line's parser takes part in no search for a name

# The notebook is executed, and an error in it is one of the build.
nb_execution_mode = "force"
nb_execution_timeout = 600  # seconds of a cell: the machine may be measured
nb_execution_raise_on_error = True
nb_merge_streams = True

# Of the public names, what their docstrings say.
autodoc_default_options = {"members": True, "imported-members": True, "member-order": "bysource", "exclude-members": "__new__, __init__"}  # fmt: skip
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80
add_module_names = False

# No page needs a network: fonts are the system's, scripts are in the site.
html_theme = "furo"
html_title = f"meshloom {release}"
html_show_copyright = False
html_extra_path = ["index.html"]
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False  # it would be fetched, which pages of files may not do
html_theme_options = {"navigation_with_keys": True}


def as_rest(app: object, what: str, name: str, thing: Any, options: object, lines: list[str]) -> None:
    """Turns a docstring, in place, into reStructuredText: words of code in their marks, indented code announced by two
    colons, and what is said of each parameter ("steps, seed: ...") as a list."""
    parameters = parameters_of(thing)
    made: list[str] = []
    in_list = False
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        said = re.match(r"(\w+(?:, \w+)*): (.*)", line)
        begins = bool(said) and all(word in parameters for word in said[1].split(", "))
        if begins and not in_list and made and made[-1]:
            made.append("")  # a list stands between empty lines
        in_list = begins or (in_list and bool(line.strip()))
        if line.startswith((">>>", "    ")) and not in_list:
            made.append(line)
            continue
        if begins and said:
            line = f":{said[1]}: {said[2]}"
        elif in_list:
            line = f"    {line.strip()}"
        elif line.endswith(":") and not after.strip():
            line += ":"
        pieces = re.split(r"(`[^`]+`)", line)
        made.append(
            "".join(f"`{each}`" if each.startswith("`") else each.replace("*", r"\*") for each in pieces)
        )
    lines[:] = made


def parameters_of(thing: Any) -> set[str]:
    """The names that a function, or a class when it is called, takes."""
    try:
        return set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return set()


def with_pages_for_folders(app: object, name: str, text: list[str]) -> None:
    """Leads links to folders, which are lists of files on GitHub, to the pages that list them here; and writes one of
    these, the examples with their sources."""
    text[0] = re.sub(r"\]\(((?:\.\./)*)(?:docs/)?(examples|decisions)/?\)", r"](\1docs/site/\2.md)", text[0])
    if name == "docs/site/examples":
        for path in sorted((ROOT / "examples").glob("[0-9]*.py")):
            said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            include = f"```{{literalinclude}} ../../examples/{path.name}\n:language: python\n```"
            text[0] += f"\n## {path.stem.replace('_', ' ')}\n\n{said.partition(chr(10))[0]}\n\n{include}\n"


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_rest)
    app.connect("source-read", with_pages_for_folders)
