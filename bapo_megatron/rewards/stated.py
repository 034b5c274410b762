"""What a response states as its final answer: the words after its thoughts, in them the last box, without decoration.

    <think>Is it \\boxed{7}?</think> No: $\\boxed{\\textbf{8.}}$  ->  after the thought  ->  the box  ->  8

Judges and majority voting read an answer the same way. Everything here takes time linear in the length, so nothing a
model writes can hang it.
"""

import re
from typing import Any, NamedTuple

MAX_CHARS = 8192
"""Only the end of a response is read: the final answer is there, and parsing time grows with length."""
DOLLAR = re.compile(r"(?<!\\)\\\$")
"""An amount of money; math-verify would take its $ for the start of a formula."""
OPEN_THOUGHT, _CLOSE_THOUGHT = "<think>", "</think>"
_BOX = r"\\(?:boxed|fbox|framebox)\s*"
_MARKS = re.compile(rf"(?P<box>{_BOX}\{{)|{_BOX}(?P<short>\d+|[A-Za-z](?![A-Za-z]))|\\.|[{{}}]", re.DOTALL)
_MAX_JOINT_CHARS = 40
_JOINT = re.compile(
    r"(?:\s|\$|\*\*|\\[()\[\] ,;:]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|,|&|\band\b|\bor\b)*", re.IGNORECASE
)
_JOINS = re.compile(r",|and|or|&", re.IGNORECASE)
_FINAL = re.compile(r"\bfinal answer(?:\s+is|\s*:)[\s:*]*([^\n]*\d[^\n]*)", re.IGNORECASE)
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_AFTER = re.compile(
    r"(?:\b(?:answer|(?:correct|right|best)\s+(?:option|choice))(?:\s+is|\s*[:：])|答案(?:是|为|[:：]))[\s:：*]*([^\n]*)",
    re.IGNORECASE,
)
_TAG = re.compile(r"</?(?:b|i|u|em|strong|code|pre|p|br|span|div|answer|final_answer)\s*/?>", re.IGNORECASE)
_GROUP = re.compile(
    r"\\(?:textbf|textit|textsf|textrm|mathbf|mathit|mathsf|boldsymbol|bm|pmb|bold|underline|emph|boxed|fbox|framebox|mbox)"
    r"\s*\{([^{}]*)\}"
)
_STYLE = re.compile(
    r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:displaystyle|textstyle|tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|it|rm)(?![A-Za-z])"
)
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?:(?:\\[,;:! ]|\{,\}|[ ~\u00a0\u2009\u202f])\d{3})+)(?!\d)")
_GAP = re.compile(r"\\[,;:! ]|\{,\}|[ ~\u00a0\u2009\u202f]")
_CHARACTERS = {i: i - 0xFEE0 for i in range(0xFF01, 0xFF5F)} | {  # full-width forms
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-"),  # hyphens, dashes and the minus sign
    ord("×"): "\\times ",
    ord("²"): "^2",
    ord("³"): "^3",
    ord("∅"): "\\emptyset ",
}
_ROOT = re.compile(r"(?:√|(?<![\\A-Za-z])sqrt)\s*(?:\(([^()]*)\)|(\d+|[a-z]))")
_EDGES = r"""\s,;:`*"“”‘’„~"""
_BEGINNING = re.compile(rf"(?:\\[,;:! ]|\\q?quad(?![A-Za-z])|[{_EDGES}]|_+(?=\w))+")
_END = re.compile(rf"(?:\\[,;:! ]|\\q?quad|\\|(?<!\\)[{_EDGES}]|(?<=\w)_+|(?<!\.)(?<!\\right)(?<!\\left)\.)+$")
_MAX_END_CHARS = 32
_PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("'", "'"), ("{", "}"))
_MAX_LAYERS = 16
_TEXT = re.compile(r"\\(?:text|mathrm|operatorname|textnormal)\s*\{([^{}]*)\}")
_LETTER = re.compile(r"[(\[]?([A-Za-z])(?:[)\]]?$|[)\].:](?=\s|\\|\$|$))")

_NUMBER = r"[-+]?\s*(?:\d+(?:,\d{3})*(?:\.\d+)?(?:\s*/\s*\d+)?|\.\d+|\\[dt]?frac\s*\{-?\d+\}\s*\{\d+\})"
_QUANTITY = re.compile(rf"([A-Za-z][A-Za-z ,:'()-]*)?\s*({_NUMBER})\s*([A-Za-z(][A-Za-z0-9 ^/().,'{{}}-]*)?")
_MAX_QUANTITY_CHARS = 200
_BASE = re.compile(r"\d_\{?(\d+)\}?$")
_CHANGES = re.compile(  # words with which a number means something else
    r"\b(?:about|above|almost|approximately|around|at|below|between|(?:b|m|tr)illions?|by|dozen|exceeds|fewer|from|greater|"
    r"half|hundreds?|least|less|minus|more|most|nearly|negative|never|no|not|over|per|quarter|roughly|smaller|than|third|"
    r"thousands?|times|to|under|unknown|up|without)\b"
)
_APPROXIMATE = re.compile(r"\s*(?:\\approx|\\sim|\\simeq|≈)")
_LISTS = frozenset(["and", "or", "percent", "percentage", "pct"])  # words that math-verify reads itself
_WORD = re.compile(r"[A-Za-z]+")
_SENTENCE = re.compile(r"(?<=\S)[.!?](?:\s|$)|,\s+(?=[a-z]{2,}\s)|\s[–—-]\s")
_COMMAND = re.compile(r"\\[A-Za-z]+")

_UNITS = {
    alias: unit
    for unit, aliases in {
        "mm": "millimeter millimetre",
        "cm": "centimeter centimetre",
        "dm": "decimeter decimetre",
        "m": "meter metre",
        "km": "kilometer kilometre",
        "in": "inch inche",
        "ft": "foot feet",
        "yd": "yard",
        "mi": "mile",
        "mg": "milligram",
        "g": "gram",
        "kg": "kilogram",
        "t": "ton tonne",
        "lb": "pound lbs",
        "oz": "ounce",
        "s": "second sec",
        "min": "minute",
        "h": "hour hr",
        "d": "day",
        "week": "",
        "month": "",
        "year": "yr",
        "ml": "milliliter millilitre",
        "l": "liter litre",
        "gal": "gallon",
        "cent": "",
        "dollar": "",
        "euro": "",
        "degree": "deg",
        "radian": "rad",
    }.items()
    for alias in (unit, *aliases.split())
}
_POWERS = ((re.compile(r"\bsquare\s+(\w+)"), r"\1^2"), (re.compile(r"\bcubic\s+(\w+)"), r"\1^3"))
_FACTOR = re.compile(r"([a-z]+)\s*(?:\^\s*\{?\s*([23])\s*\}?)?")


def spoken(response: str, in_thought: bool = False) -> str:
    """Return what follows the last closed thought, without an open one. Example: spoken("<think>a</think>b") == "b"

    Args:
        in_thought: the prompt has opened a thought, as some chat templates do.
    """
    _, closed, after = response.rpartition(_CLOSE_THOUGHT)
    return "" if in_thought and not closed else after.partition(OPEN_THOUGHT)[0]


def boxes(text: str) -> list[str] | None:
    """Return the content of the last \\boxed{}, \\fbox{} or \\framebox{}, or None if there is none.

    Boxes before it belong to it if only "and", "or" or commas stand between them. A last box that does not end holds
    nothing. A number after "final answer is" behind the last box replaces it.
    Example: boxes("\\\\boxed{7}? No: \\\\boxed{8} and \\\\boxed{9}") == ["8", "9"]
    """
    opened: list[tuple[int, int] | None] = []  # begin and content of a box, None for another brace
    found: list[tuple[int, int, int, int]] = []  # begin, content, its end, end; outermost boxes that ended
    for mark in _MARKS.finditer(text):
        if mark["box"]:
            opened.append((mark.start(), mark.end()))
        elif mark["short"]:
            found.append((mark.start(), *mark.span("short"), mark.end()))
        elif mark[0] == "{":
            opened.append(None)
        elif mark[0] == "}" and opened and (box := opened.pop()) is not None:
            while found and found[-1][0] > box[0]:
                found.pop()
            found.append((*box, mark.start(), mark.end()))
    last_open = max((box[0] for box in opened if box is not None), default=-1)
    if not found or last_open > found[-1][0]:
        return None if last_open < 0 else []
    if later := _FINAL.findall(text[found[-1][3] :]):
        return later[-1:]
    first = len(found) - 1
    while first and _are_joined(text[found[first - 1][3] : found[first][0]]):
        first -= 1
    return [text[content:end] for _, content, end, _ in found[first:]]


def _are_joined(between: str) -> bool:
    return len(between) <= _MAX_JOINT_CHARS and bool(_JOINT.fullmatch(between) and _JOINS.search(between))


def tagged(text: str) -> str | None:
    """Return the last <answer>...</answer>, or None."""
    found = _TAGGED.findall(text)
    return found[-1] if found else None


def said(text: str) -> str | None:
    """Return the rest of the line after the last "answer is", "answer:" or "correct option is", or None."""
    found = _AFTER.findall(text)
    return found[-1] if found else None


def undecorated(text: str) -> str:
    """Return an answer without bold, colour, quotes, tags, blanks and punctuation around it.

    Full-width characters become plain ones, and 10 000 or 10\\\\,000 one number.
    Example: undecorated("**\\\\color{red}{1\\\\,234}.**") == "1234"
    """
    text = _TAG.sub(" ", text[-MAX_CHARS:].translate(_CHARACTERS)).replace("\\varnothing", "\\emptyset")
    text = _ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2]}}}", _STYLE.sub("", text))
    for _ in range(_MAX_LAYERS):
        plain = _GROUP.sub(r" \1 ", text)
        if plain == text:
            break
        text = plain
    text = _THOUSANDS.sub(lambda number: number[1] + _GAP.sub("", number[2]), text)
    for _ in range(_MAX_LAYERS):
        plain = text.strip()
        if (ends := _END.search(plain, max(0, len(plain) - _MAX_END_CHARS))) is not None:
            plain = plain[: ends.start()]
        if (begins := _BEGINNING.match(plain)) is not None:
            plain = plain[begins.end() :]
        for left, right in _PAIRS:
            inner = plain[len(left) : -len(right)]
            if plain.startswith(left) and plain.endswith(right) and left not in inner and right not in inner:
                plain = inner
        if plain == text:
            break
        text = plain
    return text


def letter_of(text: str) -> str | None:
    """Return the letter of a choice, or None. Example: letter_of("\\\\textbf{(C)}\\\\ 12") == letter_of("C") == "C" """
    found = _LETTER.match(_TEXT.sub(r" \1 ", undecorated(text)).strip())
    return found[1] if found else None


def stated_math(text: str) -> list[str] | None:
    """Return the answers that a text states, undecorated; None if it only mentions numbers.

    They stand in boxes, or as a number or an expression in <answer> or after "the answer is". Linear in the length.
    """
    if (found := boxes(text)) is not None:
        return [undecorated(DOLLAR.sub("", one)) for one in found]
    rest = said(text)
    for one in (tagged(text), rest and _SENTENCE.split(rest, maxsplit=1)[0]):
        plain = undecorated(DOLLAR.sub("", one or ""))
        if plain and (_is_expression(plain) or quantity(plain) is not None):
            return [plain]
    return None


def _is_expression(text: str) -> bool:
    """Return whether a text is an expression, without a word."""
    return re.search(r"[A-Za-z]{2}", _COMMAND.sub("", text)) is None and re.search(r"\w", text) is not None


class Quantity(NamedTuple):
    number: str
    words: list[str]  # lower case
    unit: str | None  # canonical; None without a known one


def quantity(text: str) -> Quantity | None:
    """Read a number with words around it. Example: quantity("12\\text{ cm}") == Quantity("12", ["cm"], "cm")"""
    flat = " ".join(_TEXT.sub(r" \1 ", text).replace("\\,", " ").replace("~", " ").replace("\\ ", " ").split())
    found = _QUANTITY.fullmatch(flat) if len(flat) <= _MAX_QUANTITY_CHARS else None
    if found is None:
        return None
    before, number, after = found[1] or "", found[2], found[3] or ""
    unit, words = _unit(after), _WORD.findall(f"{before} {after}".lower())
    is_plain = all(len(word) > 1 for word in _WORD.findall(before)[:1]) and (
        unit is not None or not after or len(_WORD.findall(after)[0] if _WORD.findall(after) else after) > 1
    )
    return Quantity(number, words, unit) if is_plain else None


def without_words(text: str, reference: str) -> str:
    """Return the number in an answer with words, or all of it; nothing if a word or sign changes the number.

    Examples: "73 dollars" -> "73"; "at least 73" -> "", unless the reference has these words too.
    """
    if _APPROXIMATE.match(text) and not _APPROXIMATE.match(reference):
        return ""
    found = quantity(text)
    if found is None or not found.words or not _LISTS.isdisjoint(found.words):
        return text
    changes = {*_CHANGES.findall(" ".join(found.words))} - ({"per"} if found.unit else set())
    if changes - {*_CHANGES.findall(reference.lower())}:
        return ""
    return text if changes else found.number


def measure_differently(reference: str, answer: str) -> bool:
    """Return whether both have a known unit, or a base of digits, and these differ."""
    units = {one.unit for one in (quantity(undecorated(reference)), quantity(answer)) if one and one.unit}
    bases = {base[1] for one in (undecorated(reference), answer) if (base := _BASE.search(one))}
    return max(len(units), len(bases)) > 1


def _unit(text: str) -> str | None:
    """Return one spelling of a unit, or None for an unknown one. Example: _unit("square meters") == "m^2" """
    text = text.lower().strip(" .,()")
    for power, plain in _POWERS:
        text = power.sub(plain, text)
    parts = []
    for part in re.split(r"\s*/\s*|\s+per\s+", text):
        factor = _FACTOR.fullmatch(part.strip())
        name = factor[1] if factor else ""
        unit = _UNITS.get(name) or _UNITS.get(name.removesuffix("s"))
        if factor is None or unit is None:
            return None
        parts.append(unit + (f"^{factor[2]}" if factor[2] else ""))
    return "/".join(parts)


def single(answer: Any) -> Any:
    """Return the item of a list of one, or the answer itself. Example: single(["72"]) == "72" """
    while isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    return answer


def misfit(answer: Any) -> str | None:
    """Return why a reference is not one answer, or None for a string, a number, true, false, or a list of one."""
    answer = single(answer)
    if not isinstance(answer, list | dict):
        return None
    what = "an object" if isinstance(answer, dict) else f"a list of {len(answer)}"
    return (
        f"the answer {answer!r:.80} is {what}, and the judges math and text compare with one answer: make it a string "
        "or a number, or judge by a function of your own (reward.kind), which gets any JSON value"
    )
