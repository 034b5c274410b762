"""Search of the docs site: a MkDocs hook that ranks guides above the code reference and the studies."""

from typing import Any

_LATER = ("api/", "reproduction/")
_BOOST = 0.2


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lower the rank of pages that few readers search for. MkDocs calls this before the search index reads a page."""
    if page.file.src_uri.startswith(_LATER):
        page.meta["search"] = {"boost": _BOOST}
    return markdown
