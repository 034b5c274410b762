"""Messages after a sampled turn: what the chat template writes there, and nothing that a message forges.

The templates are ours, and behave as the templates of the model families that they are named after.
"""

import asyncio
import copy
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from bapo_megatron.config.schema import Config
from bapo_megatron.prompts.continuation import Continuation
from bapo_megatron.prompts.stop_tokens import stop_token_ids
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.rewards.environments import Continue, End, StepAnswer, TurnJson
from bapo_megatron.rollout.turn_tokens import TurnTokens, turn_driver
from bapo_megatron.types import Ended, Prompt, Sample, Segment

FOLDER = Path(__file__).with_name("chat_templates")
SPECIAL: dict[str, tuple[str, ...]] = {  # the end of a sequence first
    "qwen": ("<|im_end|>", "<|im_start|>", "<|endoftext|>"),
    "llama": ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    "mistral": (
        *("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    ),
    "gemma": ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    "phi": ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "glm": ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "[gMASK]", "<sop>"),
    "deepseek": (
        *("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    ),
}
ORDINARY = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
FAMILY = {
    "qwen2_5": "qwen",
    "qwen3": "qwen",
    "qwen3_instruct_2507": "qwen",
    "qwen3_5_think": "qwen",
    "smollm2": "qwen",
    "llama3": "llama",
    "llama3_1": "llama",
    "mistral": "mistral",
    "mistral_small": "mistral",
    "gemma": "gemma",
    "phi3": "phi",
    "glm4moe": "glm",
    "deepseekv3": "deepseek",
}
QUESTION = {"role": "user", "content": "3*4?"}
TOOL = {"role": "tool", "content": "12", "tool_call_id": "abcd12345"}
USER = {"role": "user", "content": "Are you sure?"}
MESSAGES = {"tool": TOOL, "user": USER}
PLAIN, THOUGHT, SPACED = "Let me see.", "<think>\nhm\n</think>\n\nLet me see.", "Let me see. \n"
LONG = 10_000
REWRITTEN = {  # the turns that the template writes in another way once a message follows
    "qwen3": {("user", THOUGHT)},
    "llama3": {("user", SPACED), ("tool", SPACED)},
    "llama3_1": {("user", SPACED), ("tool", SPACED)},
    "gemma": {("user", SPACED)},
}
ALWAYS_REWRITTEN = {"mistral", "qwen3_5_think", "deepseekv3"}  # a space; the opening of thoughts
REFUSED = {("gemma", "tool"), ("phi3", "tool"), ("glm4moe", "tool"), ("glm4moe", "user")}
SHOWN = [(name, role) for name in FAMILY for role in MESSAGES if (name, role) not in REFUSED]


def test_every_template_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == FAMILY.keys()


@functools.cache
def tokenizer_of(name: str, is_metaspace: bool = False) -> Any:
    """Return a small BPE tokenizer with the special tokens of a family, and a chat template."""
    end, *others = special = SPECIAL[FAMILY[name]]
    template = (FOLDER / f"{name}.jinja").read_text()
    one = Tokenizer(models.BPE())
    if is_metaspace:
        one.pre_tokenizer, one.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
        alphabet = [chr(i) for i in range(32, 127)] + ["\n", "▁"]
    else:
        one.pre_tokenizer, one.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [template, "user\n12\n\nAre you sure? assistant\n Let me see.", *special]
    one.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    one.add_special_tokens(list(special))
    one.add_tokens(list(ORDINARY))
    bos = next((token for token in others if token in ("<s>", "<bos>") or "begin" in token), None)
    fast = PreTrainedTokenizerFast(tokenizer_object=one, eos_token=end, bos_token=bos)
    fast.chat_template = template
    return fast


@functools.cache
def continuation_of(name: str) -> Continuation:
    return Continuation(tokenizer_of(name), {})


def rendered(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def plain(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def added(name: str, *messages: dict[str, Any], is_cut: bool = False, max_tokens: int = LONG) -> list[int]:
    one = continuation_of(name)
    return one.ids(messages, [5, one.end_id or 0], is_cut=is_cut, max_tokens=max_tokens)[0]


def text_of(name: str, *messages: dict[str, Any], **options: Any) -> str:
    return tokenizer_of(name).decode(added(name, *messages, **options))


@pytest.mark.parametrize("is_metaspace", [False, True])
@pytest.mark.parametrize(("name", "role"), SHOWN)
def test_the_tokens_are_those_that_the_template_itself_puts_after_a_turn(
    name: str, role: str, is_metaspace: bool
) -> None:
    tokenizer = tokenizer_of(name, is_metaspace)
    one, message = Continuation(tokenizer, {}), MESSAGES[role]
    for said in (PLAIN, THOUGHT, SPACED):
        sampled = plain(tokenizer, tokenizer.eos_token + said)[1:]  # behind a special token
        before = [*rendered(tokenizer, [QUESTION]), *sampled, one.end_id]
        whole = rendered(tokenizer, [QUESTION, {"role": "assistant", "content": said}, message])
        ours, is_cut = one.ids([message], [one.end_id], is_cut=False, max_tokens=LONG)
        assert whole[-len(ours) :] == ours
        assert not is_cut
        is_rewritten = name in ALWAYS_REWRITTEN or (role, said) in REWRITTEN.get(name, ())
        assert (tokenizer.decode(whole) == tokenizer.decode([*before, *ours])) != is_rewritten, said


@pytest.mark.parametrize(
    ("name", "message", "text"),
    [
        ("qwen3", USER, "\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n"),
        (
            "qwen2_5",
            TOOL,
            "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        ("qwen3_5_think", USER, "\n<|im_start|>user\nAre you sure?<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        (
            "llama3_1",
            TOOL,
            '<|start_header_id|>ipython<|end_header_id|>\n\n"12"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral", USER, "[INST]Are you sure?[/INST]"),
        ("mistral_small", TOOL, '[TOOL_RESULTS] {"content": 12, "call_id": "abcd12345"}[/TOOL_RESULTS]'),
        ("gemma", USER, "\n<start_of_turn>user\nAre you sure?<end_of_turn>\n<start_of_turn>model\n"),
        ("phi3", USER, "\n<|user|>\nAre you sure?<|end|>\n<|assistant|>\n"),
        (
            "deepseekv3",
            TOOL,
            "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>12<｜tool▁output▁end｜><｜tool▁outputs▁end｜>",
        ),
    ],
)
def test_examples(name: str, message: dict[str, str], text: str) -> None:
    assert text_of(name, message) == text
    end = tokenizer_of(name).decode([continuation_of(name).end_id])
    assert text_of(name, message, is_cut=True) == end + text, "a turn that was cut"


def test_a_turn_ends_once_whatever_stopped_it() -> None:
    tokenizer, one = tokenizer_of("llama3_1"), continuation_of("llama3_1")
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in ("<|eot_id|>", "<|eom_id|>")}

    def after(*turn: int, is_cut: bool = False) -> list[int]:
        return one.ids([TOOL], turn, is_cut=is_cut, max_tokens=LONG)[0]

    ended = after(9, ids["<|eot_id|>"])
    assert after(9, ids["<|eom_id|>"]) == ended, "another special token stopped it"
    for open_turn in (after(9), after(), after(9, is_cut=True), after(9, ids["<|eom_id|>"], is_cut=True)):
        assert open_turn == [ids["<|eot_id|>"], *ended]


def test_options_are_those_of_the_prompts() -> None:
    tokenizer = tokenizer_of("qwen3")
    config = Config.model_validate(
        {
            "environment": {"kind": "m:step"},
            "data": {"chat_template": True, "template_options": {"enable_thinking": False}},
        }
    )
    turn = TurnJson(prompt="", answer="", source="", number=1, text="", token_ids=[], end="length")
    answer = Continue(None, messages=[USER])
    token_ids, _ = TurnTokens.of(config, tokenizer, len(tokenizer)).encode(answer, turn, LONG)
    opening = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(token_ids).endswith(opening)
    stream = PromptStream(config, tokenizer)
    assert tokenizer.decode(stream.next().token_ids).endswith(opening)


def test_several_messages_follow_a_turn() -> None:
    other = {"role": "tool", "content": "13"}
    blocks = "<tool_response>\n12\n</tool_response>\n<tool_response>\n13\n</tool_response>"
    assert f"<|im_start|>user\n{blocks}<|im_end|>" in text_of("qwen3", TOOL, other), "one block"
    assert text_of("llama3_1", TOOL, other).count("ipython") == 2, "though a turn may have a single call"
    mixed = text_of("qwen3", TOOL, USER)
    assert mixed.index("12") < mixed.index("<|im_start|>user\nAre you sure?")


def specials(name: str, token_ids: Sequence[int]) -> list[int]:
    decoder = tokenizer_of(name).added_tokens_decoder
    return [i for i in token_ids if i in decoder and decoder[i].special]


def spelled(name: str) -> st.SearchStrategy[str]:
    """Return texts full of special tokens, of parts of them, and of the mark that keeps them apart."""
    whole = SPECIAL[FAMILY[name]]
    parts = [token[: len(token) // 2] for token in whole] + [token[len(token) // 2 :] for token in whole]
    return st.lists(st.sampled_from([*whole, *parts, "\ufdd0", "\n", " ", "user", "é"]) | st.text(max_size=3)).map(
        "".join
    )


@given(st.data())
def test_no_message_forges_a_special_token(data: st.DataObject) -> None:
    name, role = data.draw(st.sampled_from(SHOWN))
    content = data.draw(spelled(name))
    if content.strip() == "":
        content = "x"
    message = {**MESSAGES[role], "content": content}
    if role == "tool":
        message["name"] = data.draw(spelled(name))
    found = added(name, message)
    assert specials(name, found) == specials(name, added(name, MESSAGES[role]))
    shown = content
    if (name, role) == ("llama3_1", "tool"):
        shown = json.dumps(shown, ensure_ascii=False)
    assert shown.strip() in tokenizer_of(name).decode(found)


def test_a_template_that_hides_where_a_message_spells_a_special_token_refuses_it() -> None:
    counted = "(message.content ~ message.content | length)"
    template = (FOLDER / "smollm2.jinja").read_text().replace("message.content", counted)
    tokenizer = copy.deepcopy(tokenizer_of("smollm2"))
    tokenizer.chat_template = template
    one = Continuation(tokenizer, {})
    assert "122" in tokenizer.decode(one.ids([TOOL], [], is_cut=True, max_tokens=LONG)[0])
    with pytest.raises(ValueError, match="spells a special token, and the chat template cannot show it as text"):
        one.ids([{"role": "user", "content": "yes<|im_end|>"}], [], is_cut=True, max_tokens=LONG)


@pytest.mark.parametrize(
    ("name", "messages", "said"),
    [
        ("gemma", [TOOL], "refuses 'tool' messages after a turn: Conversation roles must alternate .*role \"user\""),
        ("gemma", [USER, USER], "^Conversation roles must alternate"),
        ("phi3", [TOOL], "does not show 'tool' messages after a turn; return them with the role \"user\""),
        ("phi3", [USER, TOOL], "does not show 'tool' messages"),
        ("phi3", [{"role": "narrator", "content": "a"}], "does not show 'narrator' messages"),
        ("glm4moe", [USER], "ends a turn with no special token, so no message can follow it; return text"),
        ("mistral_small", [{**TOOL, "tool_call_id": "1"}], "Tool call IDs should be alphanumeric strings"),
    ],
)
def test_messages_that_a_template_does_not_take_are_refused(
    name: str, messages: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        added(name, *messages)


@pytest.mark.parametrize(("name", "role"), SHOWN)
def test_a_long_message_loses_words_and_the_template_nothing(name: str, role: str) -> None:
    tokenizer, one, short = tokenizer_of(name), continuation_of(name), MESSAGES[role]
    head, tail = text_of(name, {**short, "content": "MARK"}).split("MARK")
    long = {**short, "content": "".join(f"{i} {SPECIAL[FAMILY[name]][0]} é " for i in range(90))}
    limit = len(added(name, {**short, "content": ""})) + 30
    found, is_cut = one.ids([long], [one.end_id], is_cut=False, max_tokens=limit)
    assert is_cut
    assert limit - 5 <= len(found) <= limit
    text = tokenizer.decode(found)
    assert text.startswith(head)
    assert text.endswith(tail)
    assert long["content"].startswith(text[len(head) : len(text) - len(tail)].strip())
    assert specials(name, found) == specials(name, added(name, short))
    with pytest.raises(ValueError, match=r"environment.max_answer_tokens=1 is less than the \d+ tokens that the chat"):
        one.ids([short], [], is_cut=True, max_tokens=1)


def test_a_sample_keeps_its_sampled_tokens_and_alternates_with_the_templates() -> None:
    tokenizer = tokenizer_of("qwen3")
    config = Config.model_validate({"environment": {"kind": "m:step", "max_turns": 9}, "data": {"chat_template": True}})
    driver = turn_driver(config, Tools(), TurnTokens.of(config, tokenizer, len(tokenizer)), 500)
    end = tokenizer.eos_token_id
    letters = [i for letter in "<think>\nhm" for i in plain(tokenizer, letter)]  # not as the tokenizer would
    turns = [([*letters, end], "stop"), (letters, "length"), ([*letters, end], "stop")]
    prompt = Prompt(7, tuple(rendered(tokenizer, [QUESTION])), "3*4?", "12", "test")
    sample = Sample.of("7.0", prompt)
    for turn, turn_end in turns:
        sample = sample.extended([Segment.sampled(0, 0, turn, [-1.0] * len(turn))], turn_end)
        (sample,) = asyncio.run(driver.advance([sample]))
    (trajectory,) = sample.trajectories
    assert [turn.tolist() for turn in trajectory.turns] == [turn for turn, _ in turns]
    opening = "<|im_start|>assistant\n"
    expected = (
        f"<|im_start|>user\n3*4?<|im_end|>\n{opening}<think>\nhm<|im_end|>"
        f"\n<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n{opening}<think>\nhm<|im_end|>"
        f"\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n{opening}<think>\nhm<|im_end|>"
    )
    assert tokenizer.decode(trajectory.token_ids) == expected
    assert sample.need == Ended("stop", 1.0)


class Tools:
    """An environment that answers two turns with the number of the turn, and the third with a reward."""

    deadline_s = 0.0

    def __init__(self, role: str = "tool") -> None:
        self.role = role

    async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
        if turn["number"] == 3:
            return End(1.0)
        return Continue(None, messages=[{"role": self.role, "content": str(turn["number"])}])

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "is_chat", "reason"),
    [("gemma", True, "refuses 'tool' messages"), ("qwen3", False, "set data.chat_template = true, or return text")],
)
def test_a_template_that_cannot_continue_ends_its_sample_with_the_reason(name: str, is_chat: bool, reason: str) -> None:
    tokenizer = tokenizer_of(name)
    config = Config.model_validate({"environment": {"kind": "m:step"}, "data": {"chat_template": is_chat}})
    driver = turn_driver(config, Tools(), TurnTokens.of(config, tokenizer, len(tokenizer)), 500)
    sample = Sample.of("7.0", Prompt(7, (1, 2), "3*4?", "12", "test"))
    sample = sample.extended([Segment.sampled(0, 0, [3], [-1.0])], "stop")
    (sample,) = asyncio.run(driver.advance([sample]))
    assert isinstance(sample.need, Ended)
    assert (sample.need.reason, sample.need.reward, sample.need.problem) == ("stop", 0.0, "error")
    assert reason in sample.need.message


@pytest.mark.parametrize(("name", "ends"), [("gemma", ["<eos>", "<end_of_turn>"]), ("qwen3", ["<|im_end|>"])])
def test_the_templates_end_of_a_turn_ends_one(name: str, ends: list[str]) -> None:
    def stops(kind: str, is_chat: bool) -> list[str]:
        config = Config.model_validate({"environment": {"kind": kind}, "data": {"chat_template": is_chat}})
        tokenizer = tokenizer_of(name)
        return tokenizer.convert_ids_to_tokens(list(stop_token_ids(config, tokenizer, (tokenizer.eos_token_id,))))

    assert stops("m:step", True) == stops("none", True) == ends
    assert stops("none", False) == stops("m:step", False) == ends[:1]
