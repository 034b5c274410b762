"""A page as a reader's browser has it, without a browser."""

import re
from html.parser import HTMLParser

from bapo_megatron.report.style import INK, PALETTE

NUM_SCRIPTS = 4  # two with data, the library and the page's own script


class Page(HTMLParser):
    """Tags, ids and the text that readers without scripts see, and a check that every opened element is closed."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input", "wbr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.outputs: list[str] = []  # of legends
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "output":
            self.outputs.append("")
        if tag not in self.VOID:
            self.open.append(tag)
        self._attributes(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._attributes(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data
        if self.open and self.open[-1] == "output":
            self.outputs[-1] += data

    def _attributes(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href", "srcset", "action"):
                self.links.append(value or "")


def check_self_contained(html: str, page: Page) -> None:
    assert len(page.ids) == len(set(page.ids)), "figures must not share ids"
    assert all(link.startswith(("#", "logs/")) for link in page.links)
    assert not re.search(r"url\((?!#)|@import", html)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    figures = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert not any(colour in figures for colour in (INK, *PALETTE)), "a colour that ignores the page's theme"
