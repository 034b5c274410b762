"""Text to tokens: the functions that give a tokenizer text. What a policy sampled never comes here.

A tokenizer is one of transformers'. Functions that return tokens raise ValueError for text that is not valid Unicode.
Conversations become tokens in `Continuation` (continuation.py) alone. Functions with a chat template take its options,
such as enable_thinking, and raise what the template does, which may be anything.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bapo_megatron.hf.tokenizer import CLOCK

Options = Mapping[str, Any]


_CHARS_PER_TOKEN = 16  # few texts have more than 8
_PROBE = "1"  # a text that every tokenizer has tokens for


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a plain prompt, with the special tokens that the tokenizer puts before it.

    Those that it puts behind it are left out: a response would begin after an end of the sequence. Special tokens that
    the text spells are meant.
    """
    return many_prompt_ids(tokenizer, [text])[0]


def many_prompt_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return `prompt_ids` of each text, in less time."""
    found = tokenizer([_valid(text) for text in texts], verbose=False)["input_ids"]
    num_behind = _num_behind(tokenizer)
    return [list(token_ids[: len(token_ids) - num_behind]) for token_ids in found]


def _num_behind(tokenizer: Any) -> int:
    """Return how many tokens the tokenizer puts behind a text: 1 for [<bos>, 1, <eos>]."""
    bare, whole = rendered_ids(tokenizer, _PROBE), tokenizer.encode(_PROBE)
    num_more = len(whole) - len(bare)
    starts = [start for start in range(num_more + 1) if bare and whole[start : start + len(bare)] == bare]
    return num_more - starts[0] if starts else 0


def _valid(text: str) -> str:
    """Return the text. Raises ValueError if it is not valid Unicode, which tokenizers do not take."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        half = ascii(text[problem.start])[1:-1]
        raise ValueError(f"not valid Unicode: character {problem.start + 1} of a text is {half}, half a pair") from None
    return text


def surely_exceeds(tokenizer: Any, text: str, max_tokens: int) -> bool:
    """Return whether a text surely has more tokens than a limit, without the time that all of its tokens would take.

    A beginning with twice as many tokens is enough: behind it, only the last word's tokens can change. A
    beginning without them is followed by longer ones, because tokenizers may leave any amount of white space out.
    """
    num_chars = _CHARS_PER_TOKEN * max(max_tokens, 1)
    while num_chars < len(text):
        if len(rendered_ids(tokenizer, text[:num_chars])) > 2 * max_tokens:
            return True
        num_chars *= 4
    return False


def is_template_option(tokenizer: Any, name: str) -> bool:
    """Return whether the tokenizer's chat template has an option of this name, and not a use for it of its own."""
    of_method = inspect.signature(tokenizer.apply_chat_template).parameters
    words = re.findall(r"\w+", str(tokenizer.chat_template))
    return name in words and name not in of_method and name not in ("messages", CLOCK)


def chat_text(tokenizer: Any, messages: Sequence[dict[str, Any]], options: Options, *, opens_turn: bool) -> str:
    """Return a conversation in the chat template as text, with or without the opening of the policy's turn."""
    return tokenizer.apply_chat_template(list(messages), add_generation_prompt=opens_turn, tokenize=False, **options)


def shows_tools(tokenizer: Any, schemas: Sequence[Mapping[str, Any]], options: Options) -> bool:
    """Return whether the chat template shows all tools, given as JSON schemas, in a conversation."""
    chat = [{"role": "user", "content": "q"}]
    without = chat_text(tokenizer, chat, options, opens_turn=True)
    text = chat_text(tokenizer, chat, {**options, "tools": schemas}, opens_turn=True)
    return text != without and all(schema["function"]["name"] in text for schema in schemas)


def rendered_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a piece of what `chat_text` returned."""
    return tokenizer.encode(_valid(text), add_special_tokens=False)


def words_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of anybody's words: a special token that they spell stays text."""
    return tokenizer.encode(_valid(text), add_special_tokens=False, split_special_tokens=True)
