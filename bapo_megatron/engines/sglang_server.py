"""One SGLang server: `python -m bapo_megatron.engines.sglang_server [arguments of sglang.launch_server]`.

It is SGLang's own entry point without Megatron-Core, plus compatibility with CPUs and with a torch that its kernels
were not built for, and stacks on SIGUSR1, in this process and in the schedulers that SGLang spawns (multiprocessing
imports a parent's main module again in its children); a store on loopback where the schedulers meet; the run's key;
refusals of calls that would end it (sglang_memory.py); and an exit when standard input closes.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bapo_megatron_patches.sglang import apply_cpu_compat, apply_gpu_compat

from bapo_megatron.engines import sglang_kernels
from bapo_megatron.engines.key import take_key
from bapo_megatron.engines.sglang_memory import ReleasedMemory
from bapo_megatron.engines.update_group import host_store
from bapo_megatron.errors import UserError
from bapo_megatron.runtime import LOOPBACK, raise_open_files, starting

_STORE_TIMEOUT_S = 300.0  # for the store's own requests; torch's default

with starting():
    # SGLang's debugging tools import Megatron-Core if it is installed. Megatron-Core 0.19 then switches
    # torch_memory_saver to a mode that cannot release CUDA graphs (core/inference/contexts/dynamic_context.py:72).
    sys.modules["megatron"] = None  # type: ignore[assignment]  # an import finds no package
    try:
        serving = sglang_kernels.choose()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    for variable, value in serving.variables.items():
        os.environ.setdefault(variable, value)
    apply_cpu_compat()
    if not serving.is_usual:
        apply_gpu_compat(has_kernels=not serving.problem)
    import sglang.srt.managers.scheduler  # noqa: F401 - this process and its children all import most of it
faulthandler.register(signal.SIGUSR1)  # a supervisor asks for the stacks of a hung server and of its schedulers


def main() -> None:
    """Serve until a signal, or until the parent is gone."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    threading.Thread(target=_end_when_stdin_closes, name="parent-watch", daemon=True).start()
    key = take_key()
    raise_open_files()
    load_plugins()
    arguments = prepare_server_args([*serving.arguments, *sys.argv[1:]])
    if refusal := serving.refusal(Path(arguments.model_path)):
        print(refusal, file=sys.stderr)
        sys.exit(2)
    if serving.on_gpu:
        print(serving.line, flush=True)
    try:
        with _store_on_loopback(arguments):
            from sglang.srt.entrypoints.http_server import app

            app.add_middleware(ReleasedMemory)
            if key is not None:
                _ask_for_key(key)
            run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _ask_for_key(key: str) -> None:
    """Answer only clients that send the key, except on /health, /ready and /metrics. SGLang's own middleware does it.

    If it were an argument (`--api-key`), the server would print it at its start and return it from /server_info.
    """
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import add_api_key_middleware

    add_api_key_middleware(app, api_key=key, admin_api_key=None)


@contextlib.contextmanager
def _store_on_loopback(arguments: Any) -> Iterator[None]:
    """Host the store in which the schedulers meet, and point them to it.

    By default, SGLang's first scheduler hosts one that listens on every interface, and a store obeys every client. A
    server with replicas, or on several machines, still does that.

    Args:
        arguments: sglang.srt.server_args.ServerArgs.
    """
    if arguments.dp_size > 1 or arguments.nnodes > 1 or arguments.dist_init_addr:
        yield
        return
    store = host_store(LOOPBACK, arguments.tp_size * arguments.pp_size, _STORE_TIMEOUT_S)
    os.environ |= {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's name for a store that no rank hosts
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
    }
    yield


def _end_when_stdin_closes() -> None:
    from sglang.srt.utils import kill_process_tree

    while os.read(0, 4096):
        pass
    kill_process_tree(os.getpid())


if __name__ == "__main__":
    main()
