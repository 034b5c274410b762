"""The names of all losses, as messages list them: a new loss changes no test."""

from bapo_megatron.config.losses import LOSSES

EVERY_LOSS = ", ".join(f'"{name}"' for name in LOSSES)


def losses_with(setting: str) -> str:
    """Return 'loss.name="a", loss.name="b" and loss.name="c"': the losses that have this setting, at least two."""
    *names, last = (f'loss.name="{name}"' for name, section in LOSSES.items() if setting in section.model_fields)
    return f"{', '.join(names)} and {last}"
