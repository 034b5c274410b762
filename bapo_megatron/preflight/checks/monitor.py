"""Checks of the packages and keys that metric sinks need."""

import netrc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from urllib.parse import urlsplit

from bapo_megatron.config.base import Violation
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import install_command

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "prometheus": "prometheus_client"}
"""The module of each extra that serves a sink or the endpoint of monitor.prometheus_port."""


def check_monitor(config: Config) -> Iterator[Violation]:
    """Find missing packages before anything starts."""
    users: dict[str, tuple[str, str, str]] = {
        sink: ("monitor.sinks", f'monitor.sinks has "{sink}"', f'take "{sink}" out of it')
        for sink in config.monitor.sinks
    }
    if (port := config.monitor.prometheus_port) is not None:
        users["prometheus"] = ("monitor.prometheus_port", f"monitor.prometheus_port={port}", "leave it out")
    for extra, (name, setting, instead) in users.items():
        if find_spec(PACKAGES[extra]) is None:
            yield Violation(
                (name,),
                f"{setting}, and the package {PACKAGES[extra].replace('_', '-')} is not installed",
                f"run `{install_command(extra)}`, or {instead}",
            )
        elif extra == "wandb" and not _has_wandb_key():
            yield Violation(
                (name,),
                f"{setting}, and there is no key for Weights & Biases",
                f"run `wandb login`, set WANDB_API_KEY, set WANDB_MODE=offline to send the metrics later, or {instead}",
            )


def _has_wandb_key() -> bool:
    """Return whether W&B finds a key in its usual places, or needs none."""
    if os.environ.get("WANDB_MODE", "online") not in ("online", "shared"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    files = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for file in map(os.path.expanduser, files):
        try:
            if host and host in netrc.netrc(file).hosts:
                return True
        except (OSError, netrc.NetrcParseError):  # W&B would ask for a key then, too
            continue
    return False
