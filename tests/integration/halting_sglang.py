"""A real SGLang server that can be halted in the middle of requests.

    BAPO_TEST_HALT=<file> python -m tests.integration.halting_sglang [arguments of sglang.launch_server]

While the file exists, its scheduler stops once a batch has decoded a token; `/continue_generation` lets it resume.
`/pause_generation` cannot do that: SGLang's front end holds back requests that arrive in a pause, and its schedulers
update the answer of `/v1/loads` only after a batch.
"""

import os
from pathlib import Path
from typing import Any

from bapo_megatron.engines import sglang_server  # first: it lets SGLang be imported without a GPU


def build_in() -> None:
    """Let the schedulers of this process halt, and count requests while they do."""
    from sglang.srt.managers.scheduler import Scheduler

    process, record = Scheduler.process_batch_result, Scheduler._record_scheduler_state_for_paused_engine
    file = Path(os.environ["BAPO_TEST_HALT"])

    def process_and_halt(scheduler: Scheduler, batch: Any, result: Any) -> None:
        process(scheduler, batch, result)
        if batch.forward_mode.is_decode() and file.exists():
            scheduler._engine_paused = True

    def record_and_publish(scheduler: Scheduler) -> None:
        record(scheduler)
        scheduler.publish_load_snapshot(force=True)

    Scheduler.process_batch_result = process_and_halt
    Scheduler._record_scheduler_state_for_paused_engine = record_and_publish


build_in()  # also in SGLang's children, which import their parent's main module again

if __name__ == "__main__":
    sglang_server.main()
