"""Search of the docs site: a hook of MkDocs that puts guides before the reference of the code and the studies."""

from typing import Any

_LATER = ("api/", "reproduction/")
_BOOST = 0.2


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lower the rank of a page that few readers search for. Called for each page, before the search index reads it."""
    if page.file.src_uri.startswith(_LATER):
        page.meta["search"] = {"boost": _BOOST}
    return markdown
