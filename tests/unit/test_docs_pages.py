"""README and docs: each figure has a source, and links hold on the site as in the repository."""

import posixpath
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
import site_pages

ROOT = Path(__file__).parents[2]


def test_each_figure_of_the_documentation_has_a_source_that_says_the_same() -> None:
    done = subprocess.run([sys.executable, "scripts/figures.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("uri", "link", "on_site"),
    [
        ("index.md", "[a](docs/data.md#prompts)", "[a](data.md#prompts)"),
        ("index.md", "![a](docs/images/soak.svg)", "![a](images/soak.svg)"),
        ("index.md", "[`train.py`](bapo_megatron/train.py)", "`train.py`"),
        ("data.md", "[a](losses.md)", "[a](losses.md)"),
        ("data.md", "[a](../README.md)", "[a](index.md)"),
        ("data.md", "[a](../studies/results/scope.md)", "[a](studies/scope.md)"),
        ("data.md", "![a](../studies/results/scope.svg)", "![a](studies/scope.svg)"),
        ("data.md", "[a](../setup.py)", "a"),
        ("data.md", "[a](../bapo_megatron/config/schema.py#reward)", "[a](configuration.md#reward)"),
        ("api/config.md", "[a](../../bapo_megatron/metrics.toml)", "[a](../metrics.md)"),
        ("extending.md", "[`keep_near.py`](examples/keep_near.py)", "`keep_near.py`"),
        ("studies/scope.md", "![](scope.svg)", "![](scope.svg)"),
        ("studies/scope.md", "[a](../../docs/bapo.md)", "[a](../bapo.md)"),
        ("api/types.md", "[a](../data.md)", "[a](../data.md)"),
        ("data.md", "[a](#here), [b](https://arxiv.org/abs/1)", "[a](#here), [b](https://arxiv.org/abs/1)"),
        ("data.md", "```\n[a](../setup.py)\n```", "```\n[a](../setup.py)\n```"),
    ],
)
def test_a_link_of_the_repository_leads_to_the_same_on_the_site(uri: str, link: str, on_site: str) -> None:
    assert site_pages.site_links(link, uri) == on_site


def test_a_pipe_in_the_code_of_a_table_has_no_backslash_on_the_site() -> None:
    rows = r"| `|x\|` | a \| b |" + "\n" + r"`\|` in prose"
    assert site_pages.site_tables(rows) == r"| `|x|` | a \| b |" + "\n" + r"`\|` in prose"


def test_a_link_to_a_page_that_is_gone_is_named_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    site_pages.site_links("text\n\n```\n[a](x.md)\n```\n\n[a](choosing.md#a) and [b](../none.py)\n", "data.md")
    assert caplog.messages == [
        "docs/data.md:7: links to choosing.md#a, and the repository has no docs/choosing.md",
        "docs/data.md:7: links to ../none.py, and the repository has no none.py",
    ]


def anchors(page: str) -> set[str]:
    """Return the anchors that a host of repositories gives the headings of a page in Markdown."""
    found: Counter[str] = Counter()
    for heading in re.findall(r"(?m)^#+ +(.+?) *$", page):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found[f"{slug}-{found[slug]}" if found[slug] else slug] += 1
    return set(found)


def broken_links(root: Path) -> list[str]:
    """Return the links of a repository's pages to files that it does not hold, and to headings that a page lacks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    names = listed.stdout.rstrip("\0").split("\0")
    pages = {name: prose((root / name).read_text(encoding="utf-8")) for name in names if name.endswith(".md")}
    there = {*names, *(str(folder) for name in names for folder in PurePosixPath(name).parents)}
    broken = []
    for name, page in pages.items():
        for target in re.findall(r"\]\(([^()\s]+)\)", page):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            found = posixpath.normpath(posixpath.join(posixpath.dirname(name), path)) if path else name
            if found not in there or (anchor and found in pages and anchor not in anchors(pages[found])):
                broken.append(f"{name}: {target}")
    return broken


def prose(page: str) -> str:
    return re.sub(r"(?ms)^ *```.*?^ *```$|`[^`\n]*\]\([^`\n]*`", "", page)


def test_each_link_leads_to_a_file_that_the_repository_holds() -> None:
    """A link to a page that only the site has leads to its source here; a slow test follows it to its heading."""
    assert broken_links(ROOT) == []
    assert set(site_pages.SOURCES.values()) == set(site_pages.GENERATED)


def test_a_link_to_a_file_or_heading_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(
        "# A `b`, c\n[](a.md#a-b-c) [](#a) [](site.md) [](https://x.y)\n```\n[](z)\n```\n[](./)"
    )
    (tmp_path / "site.md").write_text("written by code, and not committed")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "a.md"], cwd=tmp_path, check=True)
    assert broken_links(tmp_path) == ["a.md: #a", "a.md: site.md"]


def bracket_pairs(page: str) -> list[str]:
    """Return pairs of brackets that the site reads as one link: in "[0.9, 3.0] [lose](a.md)", the target is "lose"."""
    return re.findall(r"\][ \n]?\[[^\]]*\]", re.sub(r"(?sm)(`+).+?\1|^    .+?$", "", prose(page)))


def test_no_brackets_stand_before_those_of_a_link() -> None:
    assert bracket_pairs("[0.9, 3.0] [lose](a.md), [0,\n1]\n[a](b.md)") == ["] [lose]", "]\n[a]"]
    assert bracket_pairs("`[0, 1]` [a](a.md), [a](a.md) [b](b.md), `x[0] [1]`\n\n    x [0] [1]\n") == []
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {name: bracket_pairs((ROOT / name).read_text(encoding="utf-8")) for name in listed.stdout.splitlines()}
    assert {name: pairs for name, pairs in found.items() if pairs} == {}


class Followed(HTMLParser):
    """The ids of a page of the site, and where its links lead."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in ("href", "src") and value:
                self.targets.append(value)


@pytest.mark.slow
def test_each_link_of_the_site_leads_to_a_page_and_a_place_on_it(tmp_path: Path) -> None:
    """A strict build checks links in Markdown; this one follows what the pages hold, also menus and moved addresses."""
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True)
    pages = {path: Followed(path.read_text(encoding="utf-8")) for path in tmp_path.rglob("*.html")}
    assert len(pages) > len(site_pages.GENERATED)
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            split = urlsplit(target)
            if split.scheme or split.netloc:
                continue
            found = (tmp_path if split.path.startswith("/") else path.parent) / unquote(split.path.lstrip("/"))
            found = found.resolve() if split.path else path
            anchor = unquote(split.fragment)
            if not found.exists() or (anchor and found in pages and anchor not in pages[found].ids):
                broken.append(f"{path.relative_to(tmp_path)}: {target}")
    assert broken == []


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        ("a/old.md", "new.md#part", None),
        ("a/old.md", "none.md", "extra.moved leads a/old.md to none.md, which the site does not have"),
        ("a/old.md", "new.md#none", "extra.moved leads a/old.md to new.md#none, which the site does not have"),
        ("new.md", "new.md", "extra.moved leads new.md away, which is a page of the site"),
    ],
)
def test_an_old_address_leads_to_the_new_one(
    old: str, new: str, warning: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "new.html").write_text('<h2 id="part">')
    site_pages.on_post_build({"site_dir": str(tmp_path), "extra": {"moved": {old: new}}})
    assert caplog.messages == ([warning] if warning else [])
    if not warning:
        assert 'url=../new.html#part"' in (tmp_path / "a" / "old.html").read_text()


@pytest.mark.parametrize(
    ("uri", "is_later"), [("api/rollout.md", True), ("studies/domains.md", True), ("data.md", False)]
)
def test_a_search_of_the_docs_finds_guides_first(uri: str, is_later: bool) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})
    assert site_pages.on_page_markdown("text", page=page) == "text"
    assert page.meta == ({"search": {"boost": 0.2}} if is_later else {})
