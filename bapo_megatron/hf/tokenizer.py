"""The tokenizer that belongs to a checkpoint, and the tokens with which its files end a sequence."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.families import Family
from bapo_megatron.hf.shape import load_hf_config, model_shape, unknown_family
from bapo_megatron.runtime import starting

CLOCK = "strftime_now"
"""The function with which a chat template reads the clock; it has no other way."""
_GENERATION = "generation_config.json"


def load_tokenizer(folder: Path, own: Family | None = None) -> Any:
    """Load a checkpoint's tokenizer and check that it fits the model. Never runs code from the folder, or offers to.

    Args:
        own: see `model_shape`.

    Raises:
        CheckpointError: the model's family is not supported, or the tokenizer can produce an id without a row in its
            embedding.
    """
    hf_config = load_hf_config(folder)
    if (problem := unknown_family(hf_config, own)) is not None:
        raise CheckpointError(f"{folder / 'config.json'}: {problem}")
    with starting():  # it takes seconds
        from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    check_tokenizer(tokenizer, hf_config["vocab_size"])
    return tokenizer


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Check that the model's embedding has a row for every id that the tokenizer can produce.

    Raises:
        CheckpointError: a row is missing; names the token.
    """
    token, token_id = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if token_id >= vocab_size:
        raise CheckpointError(
            f"tokenizer and model disagree: token {token!r} has id {token_id}, but the model's vocabulary has "
            f"{vocab_size} (model.path); use the tokenizer that belongs to the checkpoint"
        )


def difference(tokenizer: Any, other: Any) -> str:
    """Say how a tokenizer numbers tokens differently from another, the policy's; "" if it does not."""
    mine, needed = ({i: token for token, i in one.get_vocab().items()} for one in (tokenizer, other))
    number = next((i for i in sorted({*mine, *needed}) if mine.get(i) != needed.get(i)), None)
    if number is None:
        return ""
    here, there = (repr(one[number]) if number in one else "no token" for one in (mine, needed))
    return f"its tokenizer is another one: token {number} is {here} there, and {there} in the policy's"


def end_token_ids(folder: Path, tokenizer: Any = None, own: Family | None = None) -> tuple[int, ...]:
    """Return the tokens that end a sequence in any file of a checkpoint: the tokenizer's, then config.json's and
    generation_config.json's.

    Args:
        tokenizer: None leaves out its token.
        own: see `model_shape`.

    Raises:
        CheckpointError: a file names something else than tokens of the model; names the file.
    """
    shape = model_shape(load_hf_config(folder), folder, own=own)
    found: list[int] = []
    for file, value in _named_ends(folder, tokenizer, shape.eos_token_ids):
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < shape.vocab_size:
                raise CheckpointError(
                    f"{folder / file}: eos_token_id = {json.dumps(value)[:200]} must be the number of a token in the "
                    f"model's vocabulary of {shape.vocab_size}, or a list of them; correct the file"
                )
            found.append(token_id)
    return tuple(dict.fromkeys(found))


def _named_ends(folder: Path, tokenizer: Any, of_shape: frozenset[int]) -> Iterator[tuple[str, Any]]:
    """Yield what each file says: a token, a list of tokens, or None. A config.json may say it twice."""
    if tokenizer is not None:
        yield "tokenizer_config.json", tokenizer.eos_token_id
    yield "config.json", json.loads((folder / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    yield "config.json", sorted(of_shape)  # its text_config's too, or the family's default
    file = folder / _GENERATION
    if not file.exists():
        return
    try:
        generation = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {file}: {error}") from error
    if not isinstance(generation, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    yield _GENERATION, generation.get("eos_token_id")


def reads_clock(folder: Path) -> bool:
    """Return whether a chat template in a checkpoint's folder asks for the time."""
    files = [folder / "tokenizer_config.json", *folder.glob("*.jinja"), *folder.glob("*/*.jinja")]
    return any(
        CLOCK in file.read_text(encoding="utf-8", errors="replace")
        for file in [*files, folder / "chat_template.json"]
        if file.is_file()
    )
