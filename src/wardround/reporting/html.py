"""HTML that is safe by construction: whatever is not `Html` already is text, and text is escaped.

>>> tag("p", "a < b", title='"x"')
'<p title="&quot;x&quot;">a &lt; b</p>'
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from typing import Any

from wardround.files import jsonable
from wardround.tables import one_line

VOID = frozenset({"img", "input", "br", "hr", "meta"})
UNWANTED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
NAME_WIDTH = 48  # longer names are cut in the middle; the whole name is in a tooltip


class Html(str):
    """Markup that needs no escaping any more."""

    __slots__ = ()


Child = Any  # Html, text, a number, None (nothing), or an iterable of these


def tag(name: str, /, *children: Child, **attributes: Any) -> Html:
    """An element. `class_` and `for_` lose their underscore, other underscores become hyphens."""
    written = "".join(attribute(key, value) for key, value in attributes.items())
    if name in VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{join(*children)}</{name}>")


def attribute(key: str, value: Any) -> str:
    """False and None leave an attribute out, True writes it without a value."""
    if value is None or value is False:
        return ""
    key = key.rstrip("_").replace("_", "-")
    return f" {key}" if value is True else f' {key}="{escape(value)}"'


def join(*children: Child) -> Html:
    """Children one after the other, text escaped."""
    parts = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            parts.append(str(child))
        elif isinstance(child, Iterable) and not isinstance(child, str):
            parts.append(join(*child))
        else:
            parts.append(escape(child))
    return Html("".join(parts))


def escape(value: Any) -> str:
    """Text for an element or a quoted attribute.

    Control characters, marks that turn the direction of what follows, and lone surrogates are dropped.
    """
    text = str(value).encode("utf-8", "replace").decode()
    return html.escape(UNWANTED.sub("", text), quote=True)


def plain(text: str, width: int = NAME_WIDTH) -> str:
    """A name from elsewhere as plain text: one line, no marks that turn the direction, cut to width."""
    return one_line(text, width)


def name(text: str, width: int = NAME_WIDTH) -> Html:
    """A name from elsewhere: set apart, so that its direction does not reach its neighbours."""
    short = plain(text, width)
    return tag("bdi", short, title=plain(text, 0) if short != plain(text, 0) else None)


def data_block(identifier: str, value: Any) -> Html:
    """JSON for programs that read the page; `<` cannot end the element."""
    text = json.dumps(jsonable(value), ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Html(f'<script type="application/json" id="{escape(identifier)}">{text}</script>')


def link(address: str, text: str | None = None) -> Html:
    """A link to a web page; anything else than https stays text."""
    if not address.startswith("https://"):
        return join(text or address)
    return tag("a", text or address, href=address, rel="noreferrer noopener")


def hidden(text: str) -> Html:
    """For screen readers only."""
    return tag("span", text, class_="unseen")


def details(summary: Child, *content: Child, class_: str | None = None) -> Html:
    return tag("details", tag("summary", summary), *content, class_=class_)


def section(identifier: str, title: Child, *content: Child, level: int = 2, lead: Child = None) -> Html:
    """A part of the page with a heading it is named by; nothing when it has no content."""
    filled = [part for part in content if part is not None and part != ""]
    if not filled:
        return Html("")
    heading = tag(f"h{level}", title, id=f"{identifier}-title")
    intro = None if lead is None else tag("p", lead, class_="lead")
    named = {"id": identifier, "aria_labelledby": f"{identifier}-title", "class_": f"level{level}"}
    return tag("section", heading, intro, *filled, **named)
