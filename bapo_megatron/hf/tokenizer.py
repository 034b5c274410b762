"""The tokenizer that belongs to a checkpoint."""

from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.families import Family
from bapo_megatron.hf.shape import load_hf_config, unknown_family
from bapo_megatron.runtime import starting


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
