"""One SGLang server: `python -m bapo_megatron.engines.sglang_server [arguments of sglang.launch_server]`.

SGLang's own entry point, and around it: the CPU compatibility and stacks on SIGUSR1, in this process and in the
schedulers that SGLang spawns (multiprocessing imports the main module of a parent again in its children), and an end
when standard input closes.
"""

import faulthandler
import os
import signal
import sys
import threading

from bapo_megatron_patches.sglang import apply_cpu_compat

apply_cpu_compat()
faulthandler.register(signal.SIGUSR1)  # a supervisor asks for the stacks of a hung server and of its schedulers


def main() -> None:
    """Serve until a signal, or until the parent is gone."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    threading.Thread(target=_end_when_stdin_closes, name="parent-watch", daemon=True).start()
    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _end_when_stdin_closes() -> None:
    from sglang.srt.utils import kill_process_tree

    while os.read(0, 4096):
        pass
    kill_process_tree(os.getpid())


if __name__ == "__main__":
    main()
