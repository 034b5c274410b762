"""What the settings of monitoring need: packages that are installed on demand."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from bapo_megatron.config.schema import Config
from bapo_megatron.config.violation import Violation

# By sink: the module, and the extra of this package that installs it. "prometheus" stands for the endpoint.
PACKAGES = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "prometheus": ("prometheus_client", "prometheus"),
}


def check_monitor(config: Config) -> Iterator[Violation]:
    """A missing package is told before anything starts."""
    for name in dict.fromkeys(config.monitor.sinks):
        yield from _package(name, f'monitor.sinks has "{name}"', f'take "{name}" out of monitor.sinks')
    if config.monitor.prometheus_port is not None:
        setting = f"monitor.prometheus_port={config.monitor.prometheus_port}"
        yield from _package("prometheus", setting, "leave monitor.prometheus_port out")


def _package(name: str, setting: str, instead: str) -> Iterator[Violation]:
    module, extra = PACKAGES[name]
    if find_spec(module) is None:
        yield Violation(
            f"{setting}, and the package {module.replace('_', '-')} is not installed; "
            f"run `pip install 'bapo-megatron[{extra}]'`, or {instead}"
        )
