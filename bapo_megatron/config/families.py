"""The model family that `model.family` names, and the token streams that it adds to a run."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from bapo_megatron.config.dotted import Seam
from bapo_megatron.errors import UserError
from bapo_megatron.hf.families import Family
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.hf.streams import model_streams

if TYPE_CHECKING:
    from bapo_megatron.tokens import TokenStream

FAMILY = Seam(
    "model.family",
    ("auto",),
    'a Family, such as FAMILY = Family("seed_oss", qkv_bias=True)',
)


def own_family(name: str) -> Family | None:
    """Return the user's own family at a dotted path, or None for "auto" (a family of the package).

    Raises:
        UserError: there is none at that path.
    """
    if name in FAMILY.names:
        return None
    family = FAMILY.load(name)
    if not isinstance(family, Family):
        raise FAMILY.error(name, f"it is of type {type(family).__name__}, not Family")
    return family


def token_streams(name: str, folder: Path, requested: Collection[str] = ()) -> tuple[TokenStream, ...]:
    """Return the streams that engines return, and that samples, checkpoints and recordings hold.

    Args:
        name: `model.family`.
        folder: the model's checkpoint.
        requested: names of the streams on request that the run learns with, such as "routes".

    Raises:
        UserError: see `own_family`; or the model is not supported, or lacks a stream that is requested.
    """
    hf_config = load_hf_config(folder)
    streams = model_streams(hf_config, own_family(name))
    if lacking := sorted(set(requested) - {stream.name for stream in streams}):
        raise UserError(
            f"{folder}: {hf_config['model_type']} models have no stream {lacking[0]!r}, which the run needs"
        )
    return tuple(stream for stream in streams if not stream.on_request or stream.name in requested)
