"""Sphinx's settings for the site; docs/make_site.py writes the pages it reads."""

from __future__ import annotations

import html
import re
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

from wardround.version import __version__

project = "wardround"
project_copyright = f"wardround {__version__}, Apache-2.0. For research; not a medical device"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["dollarmath", "attrs_block"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
highlight_language = "text"
default_role = "code"  # docstrings write `name`
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
add_module_names = False
html_theme = "pydata_sphinx_theme"
html_title = f"wardround {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sourcelink = html_show_sphinx = False
html_show_search_summary = False  # it would fetch pages, which a file may not
html_math_renderer = "mathml"
html_sidebars = {"index": []}
html_theme_options: dict[str, Any] = {
    "header_links_before_dropdown": 8,
    "navbar_align": "left",
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_prev_next": True,
    "secondary_sidebar_items": ["page-toc"],
}
pygments_style = "a11y-high-contrast-light"


def write_math(translator: Any, node: Any) -> None:
    """MathML, which browsers draw by themselves: no script and no font to fetch."""
    is_block = node.tagname == "math_block"
    math = convert(node.astext(), display="block" if is_block else "inline")
    text = html.escape(node.astext(), quote=True)
    translator.body.append(f'<{"div" if is_block else "span"} class="formula" title="{text}">{math}')
    translator.body.append("</div>" if is_block else "</span>")
    raise SkipNode


def escape_docstring(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are plain sentences with `names`: stars, bars and final underscores stand for themselves."""
    for number, line in enumerate(lines):
        parts = line.split("`")
        parts[::2] = [re.sub(r"[*|]|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
        lines[number] = "`".join(parts)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", escape_docstring)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
