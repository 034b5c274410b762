"""This machine's GPUs as NVIDIA's management library reports them, for the Prometheus endpoint."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class GPUMetric(NamedTuple):
    """A value of one GPU, read from pynvml and a device's handle."""

    description: str
    read: Callable[[Any, Any], float]


GPU_METRICS = {
    "gpu_memory_used_bytes": GPUMetric("memory in use", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    "gpu_memory_total_bytes": GPUMetric("memory", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    "gpu_utilization_ratio": GPUMetric(
        "share of the last second, or less, in which a kernel ran",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "gpu_power_watts": GPUMetric("power draw", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    "gpu_temperature_celsius": GPUMetric(
        "temperature", lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)
    ),
}


class GPUFacts:
    """All GPUs of this machine; none without a driver, a GPU, or nvidia-ml-py.

    Args:
        nvml: the module pynvml; None: the installed one, if any.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml or _installed()
        self._gpus: list[Any] = []
        if self._nvml is not None:
            try:
                self._nvml.nvmlInit()
                count = self._nvml.nvmlDeviceGetCount()
                self._gpus = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
            except self._nvml.NVMLError:
                self._gpus = []  # no driver

    def read(self) -> Iterator[tuple[str, int, float]]:
        """Yield (metric, index of the GPU, value), leaving out values that a GPU does not report."""
        for name, metric in GPU_METRICS.items():
            for index, gpu in enumerate(self._gpus):
                try:
                    value = float(metric.read(self._nvml, gpu))
                except self._nvml.NVMLError:
                    continue
                yield name, index, value


def _installed() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml
