"""A report's page as a browser's parser sees it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """What is in a page: elements with their attributes, and the cells of its tables; refuses what is not well-formed."""

    VOID = ("meta", "wbr", "br", "hr", "img", "input", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self.rows: list[list[tuple[str, str | None]]] = []
        self.said: list[str] = []
        self.data: dict[str, Any] = {}  # of the charts
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes), list(self.open)))
        assert len(dict(attributes)) == len(attributes), f"{tag}: an attribute stands twice"
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.rows = []
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append(("", dict(attributes).get("data-value")))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "table":
            self.tables[self.caption] = self.rows

    def handle_data(self, data: str) -> None:
        if "script" in self.open and self.elements[-1][1].get("type") == "application/json":
            self.data = json.loads(data)
        if "style" in self.open or "script" in self.open:
            return
        self.said.append(data)
        if "caption" in self.open:
            self.caption = data
        elif self.open and ("td" in self.open or "th" in self.open):
            text, value = self.rows[-1][-1]
            self.rows[-1][-1] = (text + data, value)

    def table(self, title: str) -> dict[str, dict[str, tuple[str, float | None]]]:
        """By row head, then by column: the text and the number behind it."""
        head, *rows = self.tables[title]
        return {
            row[0][0]: {
                name: (text, None if value is None else float(value))
                for (name, _), (text, value) in zip(head, row, strict=True)
            }
            for row in rows
        }
