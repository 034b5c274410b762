"""Pages of the site that are not files of docs/: a MkDocs hook (mkdocs.yml), run by scripts/docs.sh.

README.md is the home page, studies/results/ has the pages of the studies, and `GENERATED` lists what code writes; links
to it in the repository lead to `SOURCES`. Links between these and docs/ work in the repository and on the site; a link
to another file of the repository becomes its text. Addresses that pages once had (`extra.moved` in mkdocs.yml) lead to
the new ones.
"""

import html
import logging
import posixpath
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from layouts_page import layouts_page  # noqa: E402
from plans_page import plans_page  # noqa: E402

from bapo_megatron.config.page import metrics_page, settings_page  # noqa: E402
from benchmarks.page import benchmarks_page  # noqa: E402

GENERATED: dict[str, Callable[[], str]] = {
    "configuration.md": settings_page,
    "metrics.md": metrics_page,
    "layouts.md": layouts_page,
    "plans.md": plans_page,
    "benchmarks.md": benchmarks_page,
}
SOURCES = {
    "bapo_megatron/config/schema.py": "configuration.md",
    "bapo_megatron/config/schema_loss.py": "configuration.md",
    "bapo_megatron/metrics.toml": "metrics.md",
    "scripts/layouts_page.md": "layouts.md",
    "scripts/plans_page.py": "plans.md",
    "benchmarks/results.json": "benchmarks.md",
}
HOME = "README.md"
STUDIES = "studies/results"
NOT_ON_SITE = ("docs/examples/", "docs/measured/")
_LOWER_IN_SEARCH = ("api/", "studies/")
_BOOST = 0.2
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_ROW = re.compile(r"(?m)^\|.*\|$")
_CODE = re.compile(r"`[^`\n]*`")
_FENCE = re.compile(r"(^ *```[\s\S]*?^ *```$)", re.MULTILINE)
_MOVED = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={0}">
<a href="{0}">This page has moved.</a>
"""
log = logging.getLogger("mkdocs.hooks.site_pages")  # a warning ends a strict build


def on_files(files: Files, config: Any) -> Files:
    """Add the home page, the studies and the generated pages."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / HOME)))
    for path in sorted((ROOT / STUDIES).iterdir()):
        files.append(File.generated(config, f"studies/{path.name}", abs_src_path=str(path)))
    for name, write in GENERATED.items():
        files.append(File.generated(config, name, content=write()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to pages of the site; lower the rank of pages that few readers search for."""
    uri = page.file.src_uri
    if uri.startswith(_LOWER_IN_SEARCH):
        page.meta["search"] = {"boost": _BOOST}
    return site_links(site_tables(markdown), uri)


def site_tables(markdown: str) -> str:
    r"""Return a page's text without the backslash of a pipe in a table's code (`\|`), which the site would show."""
    return _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown)


def site_links(markdown: str, uri: str) -> str:
    """Return a page's text with its links, which hold in the repository, changed to hold on the site.

    Warns of each link to a file that the repository does not have.

    Args:
        markdown: text of the page.
        uri: the page's path on the site, such as "studies/domains.md".
    """
    parts = _FENCE.split(markdown)
    for i in range(0, len(parts), 2):  # those between are code
        line = 1 + sum(part.count("\n") for part in parts[:i])
        parts[i] = _LINK.sub(lambda link, first=line: _led(link, uri, first), parts[i])  # type: ignore[misc]
    return "".join(parts)


def _led(link: re.Match[str], uri: str, first_line: int) -> str:
    image, text, target = link.groups()
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return link[0]
    source = repository_path(uri)
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    on_site = _site_uri(found)
    if not (ROOT / found).exists():
        line = first_line + link.string[: link.start()].count("\n")
        log.warning("%s:%d: links to %s, and the repository has no %s", source, line, target, found)
    if on_site is None:
        return text
    led = posixpath.relpath(on_site, posixpath.dirname(uri) or ".")
    return f"{image}[{text}]({led}{mark}{anchor})"


def repository_path(uri: str) -> str:
    """Return the file that a page of the site is made of, from the repository's root."""
    if uri == "index.md":
        return HOME
    return f"{STUDIES}/{uri.removeprefix('studies/')}" if uri.startswith("studies/") else f"docs/{uri}"


def _site_uri(path: str) -> str | None:
    """Return where a file of the repository is on the site; None if it is not there."""
    if path == HOME:
        return "index.md"
    if path in SOURCES:
        return SOURCES[path]
    if path.startswith(NOT_ON_SITE):
        return None
    for folder, uri in ((f"{STUDIES}/", "studies/"), ("docs/", "")):
        if path.startswith(folder):
            return uri + path.removeprefix(folder)
    return None


def on_post_build(config: Any) -> None:
    """Write a page at each address that a page once had."""
    site = Path(config["site_dir"])
    for old, new in config["extra"]["moved"].items():
        page, _, anchor = new.partition("#")
        target = site / page.replace(".md", ".html")
        if not target.exists() or (anchor and f'id="{anchor}"' not in target.read_text(encoding="utf-8")):
            log.warning("extra.moved leads %s to %s, which the site does not have", old, new)
        address = site / old.replace(".md", ".html")
        if address.exists():
            log.warning("extra.moved leads %s away, which is a page of the site", old)
            continue
        address.parent.mkdir(parents=True, exist_ok=True)
        led = posixpath.relpath(new.replace(".md", ".html"), posixpath.dirname(old) or ".")
        address.write_text(_MOVED.format(html.escape(led)), encoding="utf-8")
