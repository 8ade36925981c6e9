"""Docstrings, which are plain text, as the site shows them: prose flows, columns are tables, the rest stays as it is.

A paragraph with `>>>` is an example; one of names with what they mean in a second column is a table; one that is
indented or set in other ways is shown as it is written. All else is prose, in which `names` in backticks are code
and nothing else is markup.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any

_MARKUP = re.compile(r"([\\*|_<>])")
_SET = re.compile(r"^ |\S {3,}\S|^-+$|^[-*] ")
_ROW = re.compile(r"^( *)(\S(?:.*?\S)??)( {2,})(?=\S)")


def rendered(lines: list[str]) -> list[str]:
    """The lines of a docstring as reStructuredText."""
    out: list[str] = []
    for paragraph in _paragraphs(lines):
        if paragraph == ["::"]:  # what follows is indented, and shown as it is
            continue
        if any(line.lstrip().startswith(">>> ") for line in paragraph):
            out += _block("pycon", paragraph)
        elif (rows := _table(paragraph)) is not None:
            out += [".. list-table::", "   :class: names", ""]
            for name, meaning in rows:
                out += [f"   * - {_prose(name)}", f"     - {_prose(meaning)}"]
            out += [""]
        elif any(_SET.search(line) for line in paragraph):
            out += _block("text", paragraph)
        else:
            out += [*_prose("\n".join(paragraph)).split("\n"), ""]
    return out


def _block(language: str, paragraph: list[str]) -> list[str]:
    return [
        f".. code-block:: {language}",
        "",
        *(f"   {line}" for line in dedent("\n".join(paragraph)).split("\n")),
        "",
    ]


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def _table(paragraph: list[str]) -> list[tuple[str, str]] | None:
    """Names and meanings of a paragraph in two columns; None where it is none."""
    first = _ROW.match(paragraph[0])
    if first is None or first[1]:  # formulas are indented
        return None
    column = first.end()
    rows: list[tuple[str, str]] = []
    for line in paragraph:
        found = _ROW.match(line)
        if found and not found[1] and found.end() == column:
            rows.append((found[2], line[column:]))
        elif rows and line[:column].strip() == "":  # the meaning goes on
            rows[-1] = (rows[-1][0], f"{rows[-1][1]} {line.strip()}")
        else:
            return None
    return rows


def _prose(text: str) -> str:
    parts = re.split(r"`([^`]+)`", text)  # every second one is code
    return "".join(f"``{part}``\\ " if i % 2 else _quoted(part) for i, part in enumerate(parts))


def _quoted(text: str) -> str:
    return _MARKUP.sub(r"\\\1", text).replace("`", "\\`")


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = rendered(lines)


def _is_only_said(app: Any, domain: Any, node: Any) -> bool | None:
    """Whether a name without a page is no fault: one of another package, or one of ours that exists."""
    target = node.get("reftarget", "")
    if domain is None or domain.name != "py":
        return None
    if not target.startswith("qkform."):
        return True
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError):
        return None
    return True


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    app.connect("warn-missing-reference", _is_only_said)
    return {"parallel_read_safe": True}
