"""Tool calls in the formats of model families, read out of a turn's text."""

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_megatron.prompts.tool_calls import MAX_CALLS, BadCall, Call, parse_turn

SEARCH = {"properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "tags": {"type": "array"}}}
TOOLS = {"search": SEARCH, "python": {"properties": {"code": {"type": "string"}}}}
CAT = Call("search", {"query": "cat"})
CAT_TEXT = '{"name": "search", "arguments": {"query": "cat"}}'


def tagged(call: Call) -> str:
    return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"


def as_text(call: Call) -> str:
    return f"<tool_call>{json.dumps({'name': call.name, 'arguments': json.dumps(call.arguments)})}</tool_call>"


def xml(call: Call) -> str:
    lines = (f"<parameter={name}>\n{_plain(value)}\n</parameter>\n" for name, value in call.arguments.items())
    return f"<tool_call>\n<function={call.name}>\n{''.join(lines)}</function>\n</tool_call>"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def bare(call: Call) -> str:
    return json.dumps({"name": call.name, "parameters": call.arguments})


def fenced(call: Call) -> str:
    return f"```python\n{call.arguments['code']}\n```"


NAMES = st.from_regex(r"[a-z_][a-z0-9_.-]{0,12}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.builds(Call, NAMES, st.dictionaries(st.text(), VALUES, max_size=4))
# a value that spells the end of a parameter cannot be written in XML, and the template's line breaks around one go
XML_CALLS = st.builds(
    Call,
    st.just("search"),
    st.fixed_dictionaries(
        {},
        optional={
            "query": st.text().filter(lambda text: "</parameter>" not in text),
            "limit": st.integers(),
            "tags": st.lists(st.integers() | st.booleans()),
        },
    ),
)


@settings(max_examples=50)
@given(calls=st.lists(CALLS, min_size=1, max_size=3), render=st.sampled_from([tagged, as_text]))
def test_round_trip_of_json_in_tags(calls: list[Call], render: Callable[[Call], str]) -> None:
    found = parse_turn("Both." + "|".join(map(render, calls)), TOOLS)
    assert found.calls == tuple(calls)
    assert found.content == f"Both.{'|' * (len(calls) - 1)}"
    assert parse_turn(f"<tool_call>[{', '.join(map(bare, calls))}]</tool_call>", TOOLS).calls == tuple(calls)


@settings(max_examples=50)
@given(calls=st.lists(CALLS, min_size=1, max_size=3), between=st.sampled_from(["", "\n", "; ", ", "]))
def test_round_trip_of_bare_json(calls: list[Call], between: str) -> None:
    assert parse_turn(between.join(map(bare, calls)), TOOLS).calls == tuple(calls)
    assert parse_turn(f"[{', '.join(map(bare, calls))}]", TOOLS).calls == tuple(calls)


@given(calls=st.lists(XML_CALLS, min_size=1, max_size=3))
def test_round_trip_of_xml_with_types_from_the_schema(calls: list[Call]) -> None:
    assert parse_turn("\n".join(map(xml, calls)), TOOLS).calls == tuple(calls)


@given(codes=st.lists(st.lists(st.from_regex(r"[^`\r\n]*", fullmatch=True)).map("\n".join), min_size=1, max_size=3))
def test_round_trip_of_fenced_python(codes: list[str]) -> None:
    text = "\nthen\n".join(fenced(Call("python", {"code": code})) for code in codes)
    assert parse_turn(text, TOOLS).calls == tuple(Call("python", {"code": f"{code}\n"}) for code in codes)
    assert parse_turn(text, {"search": {}}).calls == ()


PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=", "<function=search>", "</function>"]
PIECES += [
    "<parameter=query>",
    "</parameter>",
    "```python\n",
    "\n```\n",
    CAT_TEXT,
    '{"name": ',
    '"',
    "{",
    "[",
    "}",
    "\\",
]
PIECES += ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "search", "search{", "```json\n", "<arg_key>", "<arg_value>"]
PIECES += [
    "</arg_value>",
    "<tool_call>search",
    '{"name": "',
    '{"type": "function", "function": ',
    "[ ",
    "<|python_tag|>",
]
PIECES += ['"arguments": ', "1e999", "NaN", "9" * 5000, " ", "\n", "x", "\ud800"]


@settings(max_examples=300)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=30), names=st.sampled_from([(), ("search",), ("python",)]))
def test_any_text_has_a_reading_and_its_calls_are_json(pieces: list[str], names: tuple[str, ...]) -> None:
    found = parse_turn("".join(pieces), {name: TOOLS[name] for name in names})
    for call in found.calls:
        assert call.reason if isinstance(call, BadCall) else json.dumps(call.arguments, allow_nan=False)
    assert names or not found.calls


@pytest.mark.parametrize(
    "piece", [*PIECES[:30], "<tool_call>[", "<tool_call>{}", '<tool_call>{"a":"', "<think></think>"]
)
@pytest.mark.parametrize("end", ["", "</parameter>", "</tool_call>", '"name" "arguments"'])
def test_work_grows_no_faster_than_the_text(piece: str, end: str) -> None:
    def num_lines(num_pieces: int) -> int:
        """Return how many lines of Python run, which no load of the machine changes."""
        count = 0

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal count
            count += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            parse_turn(piece * num_pieces + end, TOOLS)
        finally:
            sys.settrace(before)
        return count

    short, long = num_lines(500), num_lines(1000)
    assert long <= 2 * short + 100
    parse_turn(piece * (200_000 // len(piece)) + end, TOOLS)


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        (f"<think>I call {tagged(CAT)}</think>\nDone.", f"I call {tagged(CAT)}", "Done."),
        (f"I call {tagged(CAT)}\n</think>\n\nDone.", f"I call {tagged(CAT)}", "Done."),  # the prompt opened the thought
        (f"So. <think>I call {tagged(CAT)}", f"I call {tagged(CAT)}", "So."),
    ],
)
def test_nothing_in_a_thought_is_a_call(text: str, thought: str, content: str) -> None:
    found = parse_turn(text, TOOLS)
    assert (found.thought, found.content, found.calls) == (thought, content, ())
    assert parse_turn(text, {}) == found


def test_thought_content_and_calls_are_told_apart() -> None:
    found = parse_turn(f"<think>\nA cat.\n</think>\n\nI look.\n{tagged(CAT)}\n", TOOLS)
    assert (found.thought, found.content, found.calls) == ("A cat.", "I look.", (CAT,))


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>{CAT_TEXT}",  # the stop token was </tool_call>, or it was forgotten
        "<function=search><parameter=query>cat</parameter></function>",
        "Then:\n  ```json\n  {}\n  ```\n" + f"<tool_call>{CAT_TEXT}</tool_call>",
    ],
)
def test_common_slips_are_still_calls(text: str) -> None:
    assert parse_turn(text, TOOLS).calls == (CAT,)


def test_a_line_break_in_a_string_and_code_in_an_indented_block() -> None:
    code = '{"name": "python", "arguments": {"code": "a = 1\nprint(a)"}}'
    assert parse_turn(f"<tool_call>{code}</tool_call>", TOOLS).calls == (Call("python", {"code": "a = 1\nprint(a)"}),)
    indented = "1. Run\n   ```py\n   if a:\n       print(a)\n   ```\n"
    assert parse_turn(indented, TOOLS).calls == (Call("python", {"code": "if a:\n    print(a)\n"}),)
    assert parse_turn("```json\n{}\n```\nand `python`", TOOLS).calls == ()


def test_any_schema_of_a_program_can_be_asked_about_its_arguments() -> None:
    odd: list[Any] = [None, True, False, 5, "string", [], {}, [None], {"a": None}]
    kinds = [*({"type": one} for one in odd), *({"anyOf": one} for one in odd), *({"oneOf": [one]} for one in odd)]
    for schema in (
        *odd,
        *({"properties": one} for one in odd),
        *({"properties": {"x": one}} for one in (*odd, *kinds)),
    ):
        for text in (
            "<function=f><parameter=x>5</parameter></function>",
            "<tool_call>f<arg_key>x</arg_key><arg_value>5</arg_value></tool_call>",
            '<tool_call>{"name": "f", "arguments": {"x": 5}}</tool_call>',
            'f[ARGS]{"x": 5}',
        ):
            (call,) = parse_turn(text, {"f": schema, "": schema}).calls
            assert isinstance(call, Call)
            assert call.arguments["x"] in (5, "5")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("calc(3)", "not JSON: Expecting value, at 'calc(3)"),
        ('{"name": "search", "arguments": {"query": "c', "not JSON: Unterminated string, at '\"c"),
        (f"{CAT_TEXT}}}", "ends with </tool_call>, but there is '}"),
        ('{"name": 3}', 'an object like {"name"'),
        ("[" * 100_000, "it is nested more than 100 levels"),
        (f'{{"name": "a", "arguments": {{"x": {"[" * 99}{"]" * 99}}}}}', "it is nested more than 100 levels"),
        (r'{"name": "a", "arguments": {"x": "\ud800"}}', r"it is not valid Unicode: '\ud800'"),
        (r'{"name": "a", "arguments": {"\udfff": 1}}', r"it is not valid Unicode: '\udfff'"),
        (
            r'{"name": "a", "arguments": "{\"x\": \"\\ud800\"}"}',
            "string: the call is not JSON: it is not valid Unicode",
        ),
        ('{"name": "a", "arguments": {"x": 1, "x": 2}}', "the key 'x' is twice in one object"),
        ('{"name": "a", "arguments": [1]}', '"arguments" is not an object'),
        ('{"name": "a", "arguments": "x"}', '"arguments" as a string: the call is not JSON'),
        ('{"name": "a", "arguments": {"x": NaN}}', "it has NaN"),
        ('{"name": "a", "arguments": {"x": 1e999}}', "1e999 is too large"),
        (f'{{"name": "a", "arguments": {{"x": {"9" * 5000}}}}}', "has 5000 digits"),
        ("<function=search>cat</function>", "there is 'cat</function>"),
        ("<function=search><parameter=query>cat</function>", "<parameter=query> has no </parameter>"),
        ("<function=>", "<function=NAME>"),
    ],
)
def test_a_bad_call_gets_its_reason_and_the_others_still_count(text: str, reason: str) -> None:
    (bad,) = parse_turn(f"<tool_call>{text}</tool_call>", TOOLS).calls
    assert isinstance(bad, BadCall)
    assert reason in bad.reason
    first, *_ = parse_turn(f"{tagged(CAT)}\n<tool_call>{text}</tool_call>", TOOLS).calls
    *_, last = parse_turn(f"<tool_call>{text}</tool_call>\n{tagged(CAT)}", TOOLS).calls
    assert first == CAT
    assert last == CAT or "has no </parameter>" in reason  # the next call has none either


def test_a_turn_has_a_limit_of_calls() -> None:
    for text in (
        tagged(CAT) * (MAX_CALLS + 5),
        f"<tool_call>[{f'{CAT_TEXT},' * MAX_CALLS}{CAT_TEXT}]",
        bare(CAT) * (MAX_CALLS + 5),
        "```py\n1\n```\n" * (MAX_CALLS + 5),
    ):
        calls = parse_turn(text, TOOLS).calls
        assert [type(call) for call in calls] == [Call] * MAX_CALLS + [BadCall]


@pytest.mark.parametrize(
    "text", ["It is 12.", '{"name": "Ann", "age": 3}', "[1] a cat", "<b>12</b>", "12 </tool_call>", ""]
)
def test_an_answer_is_not_a_call(text: str) -> None:
    assert parse_turn(text, TOOLS).calls == ()
    assert parse_turn(text, TOOLS).content == text


def mistral(call: Call) -> str:
    return f"[TOOL_CALLS]{call.name}[ARGS]{json.dumps(call.arguments)}"


def mistral_with_id(call: Call) -> str:
    return f"[TOOL_CALLS]{call.name}[CALL_ID]a1B2c3D4e[ARGS]{json.dumps(call.arguments)}"


def mistral_decoded(call: Call) -> str:
    """Return a call of Mistral's as it is decoded without special tokens."""
    return f"{call.name}{json.dumps(call.arguments)}"


def mistral_list(call: Call) -> str:
    return f"[TOOL_CALLS] [{json.dumps({'name': call.name, 'arguments': call.arguments, 'id': 'a1B2c3D4e'})}]"


def in_function(call: Call) -> str:
    function = {"name": call.name, "parameters": call.arguments}
    return json.dumps({"type": "function", "function": function})


def in_fence(call: Call) -> str:
    return f"```json\n{json.dumps({'name': call.name, 'arguments': call.arguments}, indent=1)}\n```\n"


def keyed(call: Call) -> str:
    pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{_plain(v)}</arg_value>\n" for k, v in call.arguments.items())
    return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"


def quoted_xml(call: Call) -> str:
    named = xml(call).replace(f"<function={call.name}>", f'<function="{call.name}">')
    return re.sub(r"<parameter=(\w+)>", r'<parameter name="\1">', named)


OFFERED = st.builds(Call, st.just("search"), st.dictionaries(st.text(), VALUES, max_size=4))
BEFORE = st.sampled_from(["", "I will search.\n", "I look: ", "Two {braces} and [brackets]:\n\n", "a{b}\n"])


@settings(max_examples=100)
@given(
    calls=st.lists(OFFERED, min_size=1, max_size=3),
    render=st.sampled_from([mistral, mistral_with_id, mistral_decoded, mistral_list, in_function, in_fence]),
    before=BEFORE,
)
def test_round_trip_behind_text(calls: list[Call], render: Callable[[Call], str], before: str) -> None:
    found = parse_turn(before + "".join(map(render, calls)), TOOLS)
    assert found.calls == tuple(calls)
    assert found.content == before.strip()


@pytest.mark.parametrize("mark", ["<tool_call>", "</tool_call>", "<think>", "</think>", "<function=search>"])
@pytest.mark.parametrize("render", [mistral, mistral_decoded, mistral_list, in_function, in_fence])
def test_a_mark_in_the_arguments_of_a_call_without_tags_is_a_word(render: Callable[[Call], str], mark: str) -> None:
    calls = [Call("search", {mark: f"{mark}a", "b": [mark]}), Call("search", {"query": f"{mark}{mark}"})]
    found = parse_turn(f"<think>{mark[1:]}</think>I look:\n" + "".join(map(render, calls)), TOOLS)
    assert (found.thought, found.content, found.calls) == (mark[1:], "I look:", tuple(calls))


@pytest.mark.parametrize("name", [None, 1, [], {}, {"name": "search"}])
def test_a_name_that_is_no_text_behind_words_is_no_call(name: Any) -> None:
    text = f"I look: {json.dumps({'name': name, 'arguments': {}})} <think>Hm</think>"
    assert parse_turn(text, TOOLS).calls == ()


@settings(max_examples=50)
@given(
    call=XML_CALLS.filter(lambda call: "</arg_value>" not in call.arguments.get("query", "")),
    render=st.sampled_from([keyed, quoted_xml]),
    before=BEFORE,
)
def test_round_trip_of_other_tags(call: Call, render: Callable[[Call], str], before: str) -> None:
    found = parse_turn(before + render(call), TOOLS)
    assert found.calls == (call,)


@settings(max_examples=100)
@given(
    # </think> in a call that is cut off may as well end a thought that the prompt has opened
    call=OFFERED.filter(lambda call: call.arguments and "</think>" not in json.dumps(call.arguments)),
    render=st.sampled_from([mistral, mistral_with_id, in_function, in_fence, bare, mistral_decoded]),
    share=st.floats(0.0, 1.0),
    before=BEFORE,
)
def test_a_call_that_is_cut_off_is_never_a_last_turn(
    call: Call, render: Callable[[Call], str], share: float, before: str
) -> None:
    whole = render(call)
    begun = (
        whole.index("arguments" if '"arguments"' in whole else '"parameters"' if '"parameters"' in whole else "{") + 13
    )
    end = max(begun, int(share * whole.rindex("}")))
    found = parse_turn(before + whole[: min(end, whole.rindex("}"))], TOOLS)
    assert found.calls
    assert isinstance(found.calls[-1], BadCall)


@pytest.mark.parametrize(
    "text",
    [
        '```js\n{"name": "search", "arguments": {}}\n```',
        'The person is {"name": "Ann", "parameters": 3}.',
        "research{x}",
        "\\text{search}{x}",
        "A [CALL_ID] and [ARGS] are marks.",
        'It has the keys "name" and "arguments", as in {"type": 1}.',
    ],
)
def test_what_only_looks_like_a_call(text: str) -> None:
    assert parse_turn(text, TOOLS).calls == ()
    assert parse_turn(text, TOOLS).content == text
