"""A trace of one thread's work and its GPU's, written by torch's profiler."""

from pathlib import Path
from typing import Any

from bapo_megatron.runtime.files import explaining_os_errors


class Trace:
    """A running trace of the thread that creates it, for Perfetto or chrome://tracing."""

    def __init__(self) -> None:
        import torch  # importing the embedded engine's protocol must not need it
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile: Any = profile(activities=activities)
        self._profile.start()

    def write(self, path: Path) -> None:
        """End the trace and write it, as .json.gz.

        Raises:
            UserError: the disk is full or not writable.
        """
        self._profile.stop()
        with explaining_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
