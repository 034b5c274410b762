"""Find phrases that read as translated, in Markdown, TOML, and the comments, docstrings and strings of Python.

    python scripts/plain_english.py [PATH ...]     reads all tracked files by default; exit code 1 if it finds any

Each line of the output names a file, a line, the phrase and its plain form. Code in Markdown (fences, indented blocks,
`inline`) is not read. If a phrase is right in its place, say so in a comment on its line:

    # english: at once
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PHRASES = {
    r"(?<!such )\b(?:that|those) of\b": "repeat the noun, or use a possessive",
    r"\bat once\b": '"immediately" or "at the same time"',
    r"\b(?:go|goes|going|went|gone) on\b": '"continues"',
    r"(?<!there )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|one\b|such\b|need\b)": '"is not a"',
    r"; None:": '"None means"',  # english: ; None:
    r"\bbeside\b": '"next to", "besides" or "while"',
    r", else(?=[\s.;:)]|$)(?! [A-Z{\[(])": '"otherwise"',
    r"\bwhere (?:there|it) (?:is|are|was|were)\b": '"if"',
    r"\balike\b": '"the same"',
    r"\bunder way\b": '"in progress"',
    r"\bso many\b": '"N"',
    r", but for\b": '"except"',  # english: , but for
    r"\bless (?:the|its|their|what)\b": '"minus"',
    r"\bTell whether\b": '"Return whether"',
    r"\bof so (?:many|few)\b": '"of N"',
    r"\b(?:in|out|away) no more\b": 'a verb, such as "refuse further"',  # english: in no more
    r", since (?!(?:the|this|that) (?:attempt|run|last|start|beginning|first|previous)|then|its)\b": '"because"',
    r"\bwhat messages call\b": '"the name of ... in messages"',
}
_OVER_LINES = [re.sub(r"(?<!such|here) (?!\[)", r"\\s+", phrase) for phrase in PHRASES]
_ANYWHERE = re.compile("|".join(f"(?P<p{n}>{phrase})" for n, phrase in enumerate(_OVER_LINES)), re.IGNORECASE)
_FORMS = list(PHRASES.values())
_NO_NOUN = re.compile(r"of (?:the|a|an|one|each|all|this|its|those|both|every) ")
_ARGUMENT = re.compile(r"^\s*\w+(?:, \w+)*: (of (?:the|a|an|one|each|all|this|its|those|both|every) )", re.MULTILINE)
_NOUN_FIRST = 'begin with the noun: what "of"?'
_ALLOWED = re.compile(r"english: ([^>\n]*?)\s*(?:-->|$)")
_SKIPPED = ("bapo_megatron/report/uplot/", "studies/results/")


@dataclass(frozen=True)
class Text:
    """A piece of prose, and the line on which it begins."""

    line: int
    text: str
    is_comment: bool = False


def python_texts(source: str) -> Iterator[Text]:
    """Yield comments, each joined over its lines, then docstrings and other strings, each joined over its parts."""
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#: ")
        is_whole_line = token.line.strip().startswith("#")
        if is_whole_line and comments and comments[-1][0] == token.start[0] - 1:
            comments.append((token.start[0], text))
            continue
        yield from _joined(comments)
        comments = [(token.start[0], text)]
    yield from _joined(comments)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values]
            yield Text(node.lineno, "".join(parts))
            for part in node.values:
                part._is_part = True  # type: ignore[attr-defined]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not hasattr(node, "_is_part"):
            yield Text(node.lineno, node.value)


def _joined(comments: list[tuple[int, str]]) -> Iterator[Text]:
    if comments:
        yield Text(comments[0][0], "\n".join(text for _, text in comments), is_comment=True)


def markdown_texts(source: str) -> Iterator[Text]:
    """Yield the page with its code blanked out."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    text = re.sub(r"(?ms)^( *)```.*?^\1```", blank, source)
    text = re.sub(r"(?m)(?<=\n\n)(?:(?: {4}|\t).*\n?)+", blank, text)
    yield Text(1, re.sub(r"`[^`\n]*`", blank, text))


def toml_texts(source: str) -> Iterator[Text]:
    """Yield the whole file: only its strings and comments contain prose."""
    yield Text(1, source)


READERS = {".py": python_texts, ".md": markdown_texts, ".toml": toml_texts}


def faults(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, phrase and plain form of each phrase to replace."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for text in READERS[path.suffix](source):
        found = [(m.start(), " ".join(m[0].split()), _form(m)) for m in _ANYWHERE.finditer(text.text)]
        if text.is_comment and (start := _NO_NOUN.match(text.text)):
            found.append((0, start[0], _NOUN_FIRST))
        found += [(m.start(1), m[1], _NOUN_FIRST) for m in _ARGUMENT.finditer(text.text)]
        for start, phrase, form in found:
            line = text.line + text.text.count("\n", 0, start)
            allowed = _ALLOWED.search(lines[min(line, len(lines)) - 1])
            if allowed is None or allowed[1] != phrase.strip():
                yield line, phrase.strip(), form


def _form(found: re.Match[str]) -> str:
    assert found.lastgroup is not None
    return _FORMS[int(found.lastgroup.removeprefix("p"))]


def tracked(paths: Iterable[str]) -> list[Path]:
    """Return the tracked files below these paths that a reader can read."""
    listed = subprocess.run(["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split("\0") if name and not name.startswith(_SKIPPED)]
    return [ROOT / name for name in names if Path(name).suffix in READERS and (ROOT / name).is_file()]


def main(paths: list[str]) -> int:
    """Print all faults and return the exit code."""
    number = 0
    for path in tracked(paths):
        for line, phrase, form in sorted(set(faults(path))):
            number += 1
            print(f"{path.relative_to(ROOT)}:{line}: {phrase!r}: {form}")
    if number:
        print(f"phrases that read as translated: {number}", file=sys.stderr)
    return 1 if number else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
