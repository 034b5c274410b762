"""The HTTP server of the embedded engine: the part of SGLang's API (0.5.23) that a trainer needs.

    python -m bapo_megatron.engines.embedded --model-path CHECKPOINT --port 0 --ready-file F

A bad request gets 400 with a message that names the field. If the engine fails, open requests get 500 and the process
ends with exit code 1. With BAPO_ENGINE_KEY in the environment, requests need that key (runtime/web.py).
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import shlex
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from aiohttp import web
from aiohttp.typedefs import Handler

from bapo_megatron.config.families import own_family
from bapo_megatron.engines.embedded import protocol
from bapo_megatron.engines.embedded.engine import INITIAL_VERSION, BatchingEngine, Sequence
from bapo_megatron.engines.embedded.model import Model
from bapo_megatron.engines.embedded.weights import WeightUpdater
from bapo_megatron.engines.key import take_key
from bapo_megatron.errors import UserError, plural
from bapo_megatron.hf.tokenizer import end_token_ids
from bapo_megatron.runtime import raise_open_files
from bapo_megatron.runtime.bodies import BadRequestError, parse
from bapo_megatron.runtime.site import Site, listen
from bapo_megatron.runtime.web import Guard
from bapo_megatron.tokens import SAMPLER_STREAMS, TokenStream

if TYPE_CHECKING:
    from bapo_megatron.engines.embedded.text import TextModel

_MAX_BODY_BYTES = 16 * 2**20  # parsing this much blocks the event loop for a second
_UPDATE_TIMEOUT_S = 300.0
_GIL_SWITCH_S = 2e-4  # the decode loop takes the interpreter lock between operators, and should get it back soon


class Server:
    """Routes of one engine."""

    def __init__(
        self,
        engine: BatchingEngine,
        *,
        model_path: str,
        update_timeout_s: float,
        text: TextModel | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Serve a trainer. With `text`, serve texts and OpenAI's routes instead, without routes that change the engine.

        Args:
            guard: decides which requests to admit. None admits requests without a key, to addresses of this machine.
        """
        self.engine = engine
        self.site = Site(guard or Guard("localhost"))
        self._text = text
        self.updater = WeightUpdater(engine, timeout_s=update_timeout_s)
        self._model_path = model_path

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_json, self.site.guarded])
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/server_info", self.server_info),
                web.get("/v1/loads", self.loads),
                web.get("/model_info", self.model_info),
                web.get("/get_model_info", self.model_info),
                web.post("/generate", self.generate),
            ]
        )
        if self._text is not None:
            from bapo_megatron.engines.embedded.openai import OpenAIRoutes

            app.add_routes([web.get("/", self.about), *OpenAIRoutes(self._text).routes()])
            return app
        app.add_routes(
            [
                web.post("/abort_request", self.abort_request),
                web.post("/pause_generation", self.pause_generation),
                web.post("/continue_generation", self.continue_generation),
                web.post("/flush_cache", self.flush_cache),
                web.post("/init_weights_update_group", self.init_weights_update_group),
                web.post("/destroy_weights_update_group", self.destroy_weights_update_group),
                web.post("/begin_weight_update", self.begin_weight_update),
                web.post("/update_weights_from_distributed", self.update_weights_from_distributed),
                web.post("/end_weight_update", self.end_weight_update),
                web.post("/update_weights_from_disk", self.update_weights_from_disk),
                web.post("/weights_checker", self.weights_checker),
                web.post("/release_memory_occupation", self.release_memory_occupation),
                web.post("/resume_memory_occupation", self.resume_memory_occupation),
                web.get("/released_memory", self.released_memory),
                web.post("/start_profile", self.start_profile),
                web.post("/stop_profile", self.stop_profile),
            ]
        )
        return app

    async def generate(self, request: web.Request) -> web.Response:
        body = parse(protocol.GenerateBody, await request.read())
        if (asked := body.to_score) is not None:
            return await self._score(*asked)
        started = time.monotonic()
        sequences, is_single = self._sequences(body, await self._token_ids(body))
        self.engine.submit(sequences)
        try:
            await asyncio.gather(*(asyncio.wrap_future(s.done) for s in sequences))
        except asyncio.CancelledError:  # the client has left: do not sample for nobody
            rids = {s.rid for s in sequences}
            self.engine.call(lambda: self.engine.abort(rids))
            raise
        latency_s = time.monotonic() - started
        replies = [self._reply(s, body, latency_s) for s in sequences]
        return web.json_response(replies[0] if is_single else replies)

    async def abort_request(self, request: web.Request) -> web.Response:
        body = parse(protocol.AbortBody, await request.read())
        if not body.rid and not body.abort_all:
            raise BadRequestError("rid: name a request, or set abort_all")
        await self._command(lambda: self.engine.abort(None if body.abort_all else {body.rid}))
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        body = parse(protocol.PauseBody, await request.read())
        await self._command(lambda: self.engine.pause(body.mode))
        return web.json_response({"status": "ok", "message": f"Generation paused successfully. mode={body.mode}"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        parse(protocol.EmptyBody, await request.read())
        await self._command(self.engine.resume)
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def flush_cache(self, request: web.Request) -> web.Response:
        await self._command(self.engine.flush_cache)
        return web.Response(text="Cache flushed.\n")

    async def init_weights_update_group(self, request: web.Request) -> web.Response:
        body = parse(protocol.InitGroupBody, await request.read())
        await asyncio.to_thread(self.updater.init_group, body)
        return _success("Succeeded to initialize custom process group.")

    async def destroy_weights_update_group(self, request: web.Request) -> web.Response:
        body = parse(protocol.DestroyGroupBody, await request.read())
        await asyncio.to_thread(self.updater.destroy_group, body.group_name)
        return _success("Succeeded to destroy custom process group.")

    async def begin_weight_update(self, request: web.Request) -> web.Response:
        parse(protocol.EmptyBody, await request.read())
        await asyncio.to_thread(self.updater.begin)
        return _success("Success")

    async def update_weights_from_distributed(self, request: web.Request) -> web.Response:
        body = parse(protocol.UpdateWeightsBody, await request.read())
        received = await asyncio.to_thread(self.updater.update, body)
        suffix = "" if body.weight_version is None else f" Weight version updated to {body.weight_version}."
        return _success(f"Succeeded to update parameter online.{suffix}", digests=received)

    async def end_weight_update(self, request: web.Request) -> web.Response:
        parse(protocol.EmptyBody, await request.read())
        await asyncio.to_thread(self.updater.end)
        return _success("Success")

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = parse(protocol.UpdateFromDiskBody, await request.read())
        await asyncio.to_thread(self.updater.update_from_disk, body)
        return _success("Succeeded to update model weights.")

    async def weights_checker(self, request: web.Request) -> web.Response:
        body = parse(protocol.WeightsCheckerBody, await request.read())
        answer = self.updater.checksum if body.action == "checksum" else self.updater.manifest
        return web.json_response({"success": True, "message": "Success"} | await asyncio.to_thread(answer))

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        body = parse(protocol.MemoryBody, await request.read())
        await asyncio.to_thread(self.updater.release, body.memory)
        return _success("Success")

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        body = parse(protocol.MemoryBody, await request.read())
        await asyncio.to_thread(self.updater.restore, body.memory)
        return _success("Success")

    async def released_memory(self, request: web.Request) -> web.Response:
        """Say what this process has released; SGLang gets the same route from engines/sglang_memory.py."""
        return web.json_response({"released": sorted(self.engine.released)})

    async def start_profile(self, request: web.Request) -> web.Response:
        body = parse(protocol.ProfileBody, await request.read())
        await self._command(lambda: self.engine.start_profile(Path(body.output_dir)))
        return web.Response(text="Start profiling.\n")

    async def stop_profile(self, request: web.Request) -> web.Response:
        await self._command(self.engine.stop_profile)
        return web.Response(text="Stop profiling. This will take some time.\n")

    async def about(self, request: web.Request) -> web.Response:
        """Say what this server offers, for people who look."""
        routes = [
            f"{route.method} {route.resource.canonical}" for route in request.app.router.routes() if route.resource
        ]
        return web.json_response(
            {"model": self._model_path, "routes": [route for route in routes if not route.startswith("HEAD")]}
        )

    def banner(self, url: str) -> str:
        """Return what to print when a server starts at `url`."""
        if self._text is None:
            return f"serving on {url}"
        asked: dict[str, Any] = {"model": self._model_path, "prompt": "1+1="}
        route = "completions"
        if self._text.tokenizer.chat_template:
            asked = {"model": self._model_path, "messages": [{"role": "user", "content": "Hello"}]}
            route = "chat/completions"
        header, body = "Content-Type: application/json", json.dumps(asked)
        curl = shlex.join(["curl", f"{url}/v1/{route}", "-H", header, "-d", body])
        return f"serving on {url}\nmodel      {self._model_path}\ntry        {curl}\nend        Ctrl-C"

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 while the engine thread lives, paused or not (SGLang answers 503 while paused)."""
        return web.Response(status=200 if self.engine.failure is None else 503)

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": self._model_path, "is_generation": True, "weight_version": self.engine.version}
        )

    async def server_info(self, request: web.Request) -> web.Response:
        engine = self.engine
        info = {
            "capabilities": ["weight_manifest", "weight_digests", "score", "release"],
            "transports": ["gloo", "disk"],
            "model_path": self._model_path,
            "context_length": engine.max_context,
            "max_running_requests": engine.max_running,
            "vocab_size": engine.model.spec.vocab_size,
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "weight_version": engine.version,
            "paused": engine.paused,
            "num_generated_tokens": engine.num_generated_tokens,
            "tp_size": 1,
            "streams": [*SAMPLER_STREAMS, *(stream.name for stream in engine.model.streams)],
        }
        return web.json_response(info | await self._command(engine.load))

    async def loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [await self._command(self.engine.load)]})

    async def _score(self, token_ids: list[int], start: int, top_k: int) -> web.Response:
        """Answer with log-probs of the prompt tokens after `start`; as in SGLang, `start` has an entry without one."""
        self.engine.new_sequence("", token_ids, protocol.SamplingParams(max_new_tokens=0))  # checks them
        if start > len(token_ids) - 2:
            raise BadRequestError(
                f"logprob_start_len: {start} leaves none of {plural(len(token_ids), 'token')} to score"
            )
        if top_k > (vocab_size := self.engine.model.spec.vocab_size):
            raise BadRequestError(f"top_logprobs_num: {top_k} exceeds the vocabulary of {vocab_size}")
        scores = await self._command(lambda: self.engine.score(token_ids, start + 1, top_k))
        if scores is None:
            message = "the weights are not whole: ask again after the update"
            return web.json_response({"success": False, "message": message}, status=503)
        scored = zip(scores.logprobs_N.tolist(), token_ids[start + 1 :], strict=True)
        meta = {
            "prompt_tokens": len(token_ids),
            "weight_version": INITIAL_VERSION if scores.version < 0 else str(scores.version),
            "input_token_logprobs": [(None, token_ids[start], None), *((p, i, None) for p, i in scored)],
        }
        if top_k:
            rows = zip(scores.top_logprobs_NK.tolist(), scores.top_ids_NK.tolist(), strict=True)
            meta["input_top_logprobs"] = [None, *([(p, i, None) for p, i in zip(*row, strict=True)] for row in rows)]
        return web.json_response({"output_ids": [], "meta_info": meta})

    async def _command(self, command: Callable[[], Any]) -> Any:
        return await asyncio.wrap_future(self.engine.call(command))

    def _sequences(
        self, body: protocol.GenerateBody, given: list[int] | list[list[int]]
    ) -> tuple[list[Sequence], bool]:
        """Return one sequence per prompt and sample, and whether the reply is a single object."""
        is_batch = isinstance(given[0], list)
        prompts: list[list[int]] = given if is_batch else [given]  # type: ignore[assignment,list-item]
        params = (
            body.sampling_params if isinstance(body.sampling_params, list) else [body.sampling_params] * len(prompts)
        )
        rids = body.rid if isinstance(body.rid, list) else [body.rid] if body.rid and not is_batch else None
        if rids is None:
            rids = [uuid.uuid4().hex for _ in prompts]
        if len(params) != len(prompts):
            raise BadRequestError(f"sampling_params: {len(params)} for {plural(len(prompts), 'prompt')}")
        if (num_samples := sum(p.n for p in params)) > (limit := protocol.MAX_SEQUENCES):
            raise BadRequestError(f"sampling_params: {num_samples} samples in a request, more than {limit}; send fewer")
        if len(rids) != len(prompts) or len(set(rids)) != len(rids):
            raise BadRequestError(f"rid: need {len(prompts)} different ones")
        streams = self._streams(body.return_rows)
        num_fed = body.num_fed if isinstance(body.num_fed, list) else [body.num_fed] * len(prompts)
        if len(num_fed) != len(prompts) or not all(1 <= n <= len(p) for n, p in zip(num_fed, prompts, strict=True)):
            raise BadRequestError("num_fed: need one number for each prompt, from 1 to its length")
        sequences = [
            self.engine.new_sequence(
                rid if p.n == 1 else f"{rid}_{i}",
                prompt,
                p,
                i,
                streams=streams,
                num_fed=known - 1,
                num_top=body.top_logprobs_num or 0,
            )
            for rid, prompt, p, known in zip(rids, prompts, params, num_fed, strict=True)
            for i in range(p.n)
        ]
        return sequences, not is_batch and params[0].n == 1

    def _streams(self, names: tuple[str, ...]) -> tuple[TokenStream, ...]:
        known = {stream.name: stream for stream in self.engine.model.streams}
        if unknown := [name for name in names if name not in known]:
            raise BadRequestError(f"return_rows: this model has no stream {unknown[0]!r}; it has {[*known]}")
        return tuple(known[name] for name in names)

    async def _token_ids(self, body: protocol.GenerateBody) -> list[int] | list[list[int]]:
        if body.text is None:
            assert body.input_ids is not None, "the body has been checked"
            return body.input_ids
        if (model := self._text) is None:
            raise BadRequestError("text: this server has no tokenizer; send input_ids, or start it with `bapo serve`")
        text = body.text
        if isinstance(text, str):
            return await model.in_thread(lambda: model.encode(text))
        return await model.in_thread(lambda: [model.encode(one) for one in text])

    def _reply(self, sequence: Sequence, body: protocol.GenerateBody, latency_s: float) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": sequence.rid,
            "finish_reason": sequence.finish_reason,
            "prompt_tokens": len(sequence.prompt_ids),
            "completion_tokens": len(sequence.output_ids),
            "cached_tokens": sequence.num_cached_tokens,
            "weight_version": self.engine.version,
            "weight_versions": sequence.spans,
            "num_retractions": sequence.num_retractions,
            "e2e_latency": latency_s,
        }
        if body.return_logprob:
            pairs = zip(sequence.logprobs, sequence.output_ids, strict=True)
            meta["output_token_logprobs"] = [(logprob, token_id, None) for logprob, token_id in pairs]
        if body.top_logprobs_num:
            meta["output_top_logprobs"] = [[(*pair, None) for pair in row] for row in sequence.top_logprobs]
        if body.return_sampling_mask:
            meta["output_token_sampling_logprobs"] = sequence.cut_logprobs
        if body.return_rows:
            meta["rows"] = sequence.encoded_rows()
        reply = {"output_ids": sequence.output_ids, "meta_info": meta}
        if self._text is not None:
            reply["text"] = self._text.tokenizer.decode(sequence.output_ids, skip_special_tokens=True)
        return reply


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequestError as problem:
        return web.json_response({"success": False, "message": str(problem)}, status=problem.status)
    except web.RequestPayloadError as problem:  # cut off, or not in the encoding that its header names
        message = f"body: {' '.join(str(problem).split())}"
        return web.json_response({"success": False, "message": message}, status=400)
    except web.HTTPException:
        raise
    except Exception as problem:
        message = f"{type(problem).__name__}: {problem}"
        return web.json_response({"success": False, "message": message}, status=500)


def _success(message: str, **facts: Any) -> web.Response:
    return web.json_response({"success": True, "message": message} | facts)


async def serve_engine(
    server: Server, *, host: str, port: int, ready_file: Path | None, exit_with_parent: bool
) -> None:
    """Serve until a signal, until the engine fails, or until stdin closes (`exit_with_parent`)."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if exit_with_parent:
        threading.Thread(target=_exit_when_stdin_closes, daemon=True).start()
    try:
        sockets = listen(host, port)
    except UserError as problem:
        print(problem, file=sys.stderr, flush=True)
        os._exit(2)  # skip Python's shutdown, which fails with the thread that reads stdin
    await server.site.start(server.app(), sockets, shutdown_timeout_s=1.0)
    address = sockets[0].getsockname()
    name = f"[{address[0]}]" if ":" in address[0] else address[0]
    print(server.banner(f"http://{name}:{address[1]}"), flush=True)
    if ready_file is not None:
        partial = ready_file.with_name(f"{ready_file.name}.partial")
        partial.write_text(json.dumps({"host": address[0], "port": address[1], "pid": os.getpid()}))
        partial.replace(ready_file)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((stopped, asyncio.wrap_future(server.engine.ended)), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    await server.site.close()


def _exit_when_stdin_closes() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(0)  # immediately: a broadcast or a decode step may be in progress, and nobody waits for it


def check_address(host: str, port: int) -> None:
    """Raise UserError if nothing can listen there. Loading a model takes long: check first."""
    for listening in listen(host, port):
        listening.close()


def serve_text(text: TextModel, *, host: str, port: int) -> NoReturn:
    """Serve token ids, texts and OpenAI's routes until a signal. OpenAI's clients send a key; any works."""
    raise_open_files()
    guard = Guard(host)
    server = Server(text.engine, model_path=text.name, update_timeout_s=_UPDATE_TIMEOUT_S, text=text, guard=guard)
    sys.setswitchinterval(_GIL_SWITCH_S)
    asyncio.run(serve_engine(server, host=host, port=port, ready_file=None, exit_with_parent=False))
    _leave(text.engine)


def main(argv: list[str] | None = None, *, model_type: type[Model] = Model) -> None:
    parser = argparse.ArgumentParser(prog="python -m bapo_megatron.engines.embedded", description=__doc__)
    parser.add_argument("--model-path", required=True, help="Hugging Face checkpoint folder")
    parser.add_argument("--family", default="auto", help="model.family: the path of a family of your own")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: the system picks one; see --ready-file")
    parser.add_argument("--max-context", type=int, required=True, help="longest prompt + response, in tokens")
    parser.add_argument("--max-running", type=int, default=256, help="sequences decoded together; more wait")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads that sample")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--weight-version", default="default", help="version of the weights in --model-path")
    parser.add_argument(
        "--update-timeout-s", type=float, default=_UPDATE_TIMEOUT_S, help="deadline of each weight-update stage"
    )
    parser.add_argument("--ready-file", type=Path, help='written once healthy: JSON {"host", "port", "pid"}')
    parser.add_argument("--exit-with-parent", action="store_true", help="exit when stdin closes")
    args = parser.parse_args(argv)

    key = take_key()
    raise_open_files()
    faulthandler.register(signal.SIGUSR1)  # a supervisor asks for the stacks of a hung engine
    torch.set_num_threads(1)  # for this thread: see BatchingEngine
    sys.setswitchinterval(_GIL_SWITCH_S)
    try:
        own, dtype = own_family(args.family), getattr(torch, args.dtype)
        model = model_type.from_pretrained(args.model_path, max_len=args.max_context, dtype=dtype, own=own)
        end_ids = end_token_ids(Path(args.model_path), own=own)  # as SGLang, which has no tokenizer either
    except UserError as problem:
        parser.exit(2, f"{problem}\n")
    engine = BatchingEngine(
        model,
        max_running=args.max_running,
        max_context=args.max_context,
        version=args.weight_version,
        end_ids=end_ids,
        num_threads=args.threads,
    )
    guard = Guard(args.host, None if key is None else {key})
    server = Server(engine, model_path=args.model_path, update_timeout_s=args.update_timeout_s, guard=guard)
    asyncio.run(
        serve_engine(
            server,
            host=args.host,
            port=args.port,
            ready_file=args.ready_file,
            exit_with_parent=args.exit_with_parent,
        )
    )
    _leave(engine)


def _leave(engine: BatchingEngine) -> NoReturn:
    """End the process once every request is answered. Exit code 1 asks a supervisor to start it again."""
    os._exit(0 if engine.failure is None else 1)  # skip Python's shutdown: a daemon thread inside torch can crash it
