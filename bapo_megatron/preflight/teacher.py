"""Checks of a teacher that is served: its key, what its servers answer, and the prompts that its hint makes."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

from bapo_megatron.config.base import Violation, warning
from bapo_megatron.errors import UserError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.resolved import Resolved


def check_served_teacher(run: Resolved, model: Path | None, *, here: bool, asks: bool) -> Iterator[Violation]:
    """Check teacher.urls, teacher.urls_by_source or teacher.hint.

    Args:
        model: folder with the policy's tokenizer; None if it is not on this machine, so that nothing is tokenised.
        here: whether files must be on this machine.
        asks: whether to ask the servers.
    """
    config, teacher = run.config, run.config.teacher
    key = teacher.api_key if teacher.all_urls else None
    if key is not None and not here and not Path(key).expanduser().exists():
        problem = f"teacher.api_key={key} is not on this machine, and was not read"
        yield warning(("teacher.api_key",), problem, "the run needs it")
        return
    if not (run.engine.samples and teacher.is_served) or model is None or run.model is None or run.model.problems:
        return
    from bapo_megatron.prompts.mixture import prompts_of
    from bapo_megatron.rollout.teacher import CHECK_TIMEOUT_S, Hint, TeacherServers

    tokenizer = load_tokenizer(model, run.own)
    if teacher.hint is not None:
        with contextlib.suppress(UserError):  # read_inputs tells what is wrong with prompts
            prompts = prompts_of(config, tokenizer)
            first, hint = prompts.next(), Hint(teacher.hint, prompts)
            try:
                hint.check(config.longest_sequence - config.longest_trained + config.data.max_prompt_tokens)
                hint(first)
            except UserError as error:
                yield Violation(("teacher.hint", "data.max_prompt_tokens", "data.source", "data.sources"), str(error))
    elif asks:
        timeout_s = min(CHECK_TIMEOUT_S, teacher.timeout_s)

        async def ask() -> None:
            servers = TeacherServers(teacher, run.shape.vocab_size, timeout_s)
            try:
                await servers.check(run, tokenizer)
            finally:
                await servers.close()

        try:
            asyncio.run(ask())
        except UserError as error:
            yield Violation((teacher.given, "teacher.api_key"), str(error))
