"""`bapo chat`: a conversation in the terminal."""

import asyncio
import concurrent.futures
import contextlib
import sys

from bapo_megatron.engines.embedded.protocol import BadRequestError, SamplingParams
from bapo_megatron.engines.embedded.text import Reply, TextModel

_END_TIMEOUT_S = 60.0  # for one engine step


def chat(model: TextModel, *, temperature: float, system: str | None) -> None:
    """Read messages and print replies as they grow, until input ends. Ctrl-C stops a reply."""
    try:
        _converse(model, temperature, system)
    finally:  # a thread inside torch can crash Python's shutdown, and a stopped reply may have a step to finish
        concurrent.futures.wait([model.engine.call(lambda: None, when_still=True)], _END_TIMEOUT_S)


def _converse(model: TextModel, temperature: float, system: str | None) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  lines can be edited and recalled

    is_terminal = sys.stdin.isatty()
    if is_terminal:
        kept = "the conversation" if model.tokenizer.chat_template else "nothing: it has no chat template"
        print(f"{model.name} remembers {kept}; Ctrl-C stops a reply, Ctrl-D ends")
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while True:
        try:
            text = input("> " if is_terminal else "")
        except EOFError:
            if is_terminal:
                print()
            return
        except KeyboardInterrupt:  # discard the line
            print()
            continue
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        try:
            prompt_ids = model.encode_chat(messages)
            params = SamplingParams(temperature=temperature, max_new_tokens=model.room(prompt_ids))
            reply = Reply(model, prompt_ids, params)
        except BadRequestError as error:
            print(f"{error}; starting over")
            messages = list(start)
            continue
        said: list[str] = []
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_print(reply, said))
        print()
        messages.append({"role": "assistant", "content": "".join(said)})


async def _print(reply: Reply, said: list[str]) -> None:
    """Print the reply as it grows, and collect its pieces."""
    async with contextlib.aclosing(reply.pieces()) as pieces:
        async for text in pieces:
            print(text, end="", flush=True)
            said.append(text)
