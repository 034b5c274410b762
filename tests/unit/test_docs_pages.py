"""README and docs: each figure has a source, and links hold on the site as in the repository."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

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


def test_a_link_to_a_page_that_is_gone_is_named_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    site_pages.site_links("text\n\n```\n[a](x.md)\n```\n\n[a](choosing.md#a) and [b](../none.py)\n", "data.md")
    assert caplog.messages == [
        "docs/data.md:7: links to choosing.md#a, and the repository has no docs/choosing.md",
        "docs/data.md:7: links to ../none.py, and the repository has no none.py",
    ]


def test_each_link_of_the_documentation_leads_to_a_file(caplog: pytest.LogCaptureFixture) -> None:
    """scripts/docs.sh build checks the anchors as well."""
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    pages += [f"studies/{path.name}" for path in (ROOT / "studies" / "results").glob("*.md")]
    for uri in ["index.md", *pages]:
        site_pages.site_links((ROOT / site_pages.repository_path(uri)).read_text(encoding="utf-8"), uri)
    assert caplog.messages == []
    assert set(site_pages.SOURCES.values()) == set(site_pages.GENERATED)
    assert [path for path in site_pages.SOURCES if not (ROOT / path).is_file()] == []


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
