"""Text to tokens: the functions that give a tokenizer text. What a policy sampled never comes here.

A tokenizer is one of transformers'. Functions with a chat template take its options, such as enable_thinking, and raise
what the template does, which may be anything.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

Options = Mapping[str, Any]


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a prompt, with the special tokens that the tokenizer puts around it."""
    return tokenizer.encode(text)


def many_prompt_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return `prompt_ids` of each text, in less time."""
    return tokenizer(list(texts), verbose=False)["input_ids"]


def is_template_option(tokenizer: Any, name: str) -> bool:
    """Return whether the tokenizer's chat template has an option of this name, and not a use for it of its own."""
    of_method = inspect.signature(tokenizer.apply_chat_template).parameters
    words = re.findall(r"\w+", str(tokenizer.chat_template))
    return name in words and name not in of_method and name != "messages"


def chat_ids(tokenizer: Any, messages: Sequence[dict[str, Any]], options: Options) -> list[int]:
    """Return the tokens of a conversation in the chat template, and of the opening of the policy's turn."""
    # the default of return_dict depends on transformers' version
    return tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )


def many_chat_ids(tokenizer: Any, chats: Sequence[list[dict[str, Any]]], options: Options) -> list[list[int]]:
    """Return `chat_ids` of each conversation, in less time."""
    texts = tokenizer.apply_chat_template(list(chats), add_generation_prompt=True, tokenize=False, **options)
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


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
    return tokenizer.encode(text, add_special_tokens=False)


def words_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of anybody's words: a special token that they spell stays text."""
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
