"""Text in, text out: an engine with its tokenizer, and replies that grow piece by piece.

Training sends token ids and needs none of this; `bapo serve` and `bapo chat` do.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from tokenizers.decoders import DecodeStream

from bapo_megatron.config.schema import Config
from bapo_megatron.engines.embedded.engine import BatchingEngine
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.embedded.protocol import SamplingParams
from bapo_megatron.errors import UserError, plural
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.families import Family
from bapo_megatron.hf.tokenizer import end_token_ids, load_tokenizer
from bapo_megatron.prompts.continuation import Continuation, TooLongError
from bapo_megatron.prompts.encoding import prompt_ids, surely_exceeds
from bapo_megatron.prompts.stop_tokens import chat_of, stop_token_ids
from bapo_megatron.runtime.bodies import BadRequestError

T = TypeVar("T")


class TextModel:
    """A model that reads and writes text.

    Args:
        engine: its own `end_ids` end responses to plain prompts.
        template: the chat template, if there is one.
        chat_stop_ids: tokens that end a reply in a conversation.
    """

    def __init__(
        self,
        engine: BatchingEngine,
        tokenizer: Any,
        name: str,
        template: Continuation | None,
        chat_stop_ids: Sequence[int],
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.name = name
        self.template = template
        self.chat_stop_ids = chat_stop_ids
        self._encoder = copy.deepcopy(tokenizer)  # threads must not share one: what an encoding asks for changes it
        self._thread = ThreadPoolExecutor(1, "encoder")

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        name: str,
        max_context: int | None,
        max_running: int,
        dtype: torch.dtype,
        num_threads: int | None = None,
        own: Family | None = None,
        config: Config | None = None,
    ) -> TextModel:
        """Load a checkpoint folder and start its engine.

        Args:
            max_context: longest prompt and response together, in tokens; None means as long as the model allows.
            max_running: responses sampled at the same time; more wait.
            num_threads: see `BatchingEngine`.
            own: see `model_shape`.
            config: the configuration of the model's run; None means the default one.

        Raises:
            CheckpointError: see `Model.from_pretrained` and `end_token_ids`.
            UserError: the model allows no such context, no token ends a response, or there is no room for the cache.
        """
        longest = ModelFacts.of(folder, own).shape.max_positions
        context = max_context or longest
        if context > longest:
            raise UserError(f"--max-context {context}: {name} allows at most {longest} tokens")
        config, tokenizer = config or Config(), load_tokenizer(folder, own)
        end_ids = end_token_ids(folder, tokenizer, own)
        data = config.data.model_copy(update={"chat_template": bool(tokenizer.chat_template)})
        config = config.model_copy(update={"data": data})
        template = chat_of(config, copy.deepcopy(tokenizer)) if data.chat_template else None
        stop_ids = stop_token_ids(config, tokenizer, end_ids)
        plain = [i for i in stop_ids if i in end_ids or template is None or i != template.end_id]
        model = Model.from_pretrained(folder, max_len=context, dtype=dtype, own=own)
        try:
            engine = BatchingEngine(
                model, max_running=max_running, max_context=context, end_ids=plain, num_threads=num_threads
            )
        except OSError as error:
            raise UserError(
                f"no memory for {plural(max_running, 'response')} of {context} tokens ({error.strerror}); lower "
                "--max-context"
            ) from error
        return cls(engine, tokenizer, name, template, stop_ids)

    async def in_thread(self, encode: Callable[[], T]) -> T:
        """Call a function that encodes, in the one thread for it: a long text does not stop the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, encode)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, as training encodes it. Raises BadRequestError."""
        try:
            if not surely_exceeds(self._encoder, text, self.engine.max_context):
                return prompt_ids(self._encoder, text)
        except ValueError as problem:
            raise BadRequestError(f"the prompt: {problem}") from problem
        raise self._no_room(f"more than {self.engine.max_context}")

    def encode_chat(self, messages: Sequence[dict[str, str]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the ids of a conversation in the chat template, as training encodes it, or of its last message if
        there is no template.

        Args:
            tools: JSON schemas for the template.

        Raises:
            BadRequestError: the template refuses the conversation, or it is too long.
        """
        if self.template is None:
            return self.encode(messages[-1]["content"])
        try:
            return self.template.whole(messages, tools, self.engine.max_context)
        except TooLongError as problem:
            raise self._no_room(f"more than {self.engine.max_context}") from problem
        except ValueError as problem:
            raise BadRequestError(f"messages: {problem}") from problem

    def room(self, prompt_ids: Sequence[int]) -> int:
        """Return how many tokens a response may have. Raises BadRequestError if there is no room."""
        if not prompt_ids:
            raise BadRequestError("the prompt is empty")
        left = self.engine.max_context - len(prompt_ids)
        if left < 1:
            raise self._no_room(str(len(prompt_ids)))
        return left

    def _no_room(self, num_tokens: str) -> BadRequestError:
        return BadRequestError(
            f"the prompt has {num_tokens} tokens, which leaves no room in a context of {self.engine.max_context}"
        )


class Reply:
    """One response as text.

    Args:
        stop: texts that end the response and are not part of it.
        index: number of this sample of its prompt; each has its own seed.

    Raises:
        BadRequestError: the request does not fit the model.
    """

    def __init__(
        self, model: TextModel, prompt_ids: list[int], params: SamplingParams, stop: Sequence[str] = (), index: int = 0
    ) -> None:
        self.sequence = model.engine.new_sequence(uuid.uuid4().hex, prompt_ids, params, index)
        self._model = model
        self._stop = stop
        self._stopped = False

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        """Why the response ended, in OpenAI's words."""
        ended = self.sequence.finish_reason
        return "length" if not self._stopped and ended is not None and ended["type"] == "length" else "stop"

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Sample, and yield the text as it grows. Leaving the iteration ends the request."""
        engine, sequence = self._model.engine, self.sequence
        loop, grown = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and the engine does not know yet
                loop.call_soon_threadsafe(grown.set)

        sequence.on_token = wake
        done = asyncio.wrap_future(sequence.done)
        done.add_done_callback(lambda _: grown.set())
        engine.submit([sequence])
        try:
            async for text in self._cut(self._decoded(grown, done)):
                yield text
            if not self._stopped:
                await done  # raises what went wrong
        finally:
            if not done.done():
                engine.call(lambda: engine.abort({sequence.rid}))

    async def _decoded(self, grown: asyncio.Event, done: asyncio.Future[Any]) -> AsyncGenerator[str, None]:
        """Yield the text of new tokens; hold a character back until all its tokens are here."""
        decoder, num_read = DecodeStream(skip_special_tokens=True), 0
        while True:
            await grown.wait()
            grown.clear()
            is_done, ids = done.done(), self.sequence.output_ids
            new_ids, num_read = ids[num_read:], len(ids)
            texts = (decoder.step(self._model.tokenizer.backend_tokenizer, token_id) for token_id in new_ids)
            if text := "".join(text for text in texts if text):
                yield text
            if is_done:
                return

    async def _cut(self, texts: AsyncIterator[str]) -> AsyncGenerator[str, None]:
        """Yield the text up to the first stop text; hold back what may be the beginning of one."""
        held, longest = "", max((len(stop) for stop in self._stop), default=1)
        async for text in texts:
            held += text
            ends = [place for stop in self._stop if (place := held.find(stop)) >= 0]
            if ends:
                self._stopped = True
                held = held[: min(ends)]
                break
            sure = len(held) - (longest - 1)
            if sure > 0:
                yield held[:sure]
                held = held[sure:]
        if held:
            yield held
