"""The facts of a checkpoint that follow from its config.json: each is derived once, when it is first asked for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.errors import UserError
from bapo_megatron.hf.families import Family
from bapo_megatron.hf.shape import ModelShape, family_of, load_hf_config, model_shape, unknown_family, unsupported
from bapo_megatron.hf.streams import ModelStream

if TYPE_CHECKING:
    from bapo_megatron.tokens import TokenStream


@dataclass(frozen=True)
class ModelFacts:
    """The facts of one checkpoint.

    Example: ModelFacts.of(folder).shape.num_layers == 28
    """

    hf_config: dict[str, Any]
    own: Family | None = None  # the user's own family (`model.family`); other models have a family of the package
    folder: Path | None = None  # None: only the config.json is known

    @classmethod
    def of(cls, folder: str | Path, own: Family | None = None) -> ModelFacts:
        """Read the config.json in a folder. Raises CheckpointError: see `load_hf_config`."""
        return cls(load_hf_config(folder), own, Path(folder))

    @property
    def has_family(self) -> bool:
        return unknown_family(self.hf_config, self.own) is None

    @cached_property
    def problems(self) -> list[str]:
        """Why this model can be neither trained nor served; empty if it can."""
        return unsupported(self.hf_config, self.own)

    @cached_property
    def shape(self) -> ModelShape:
        """Raises CheckpointError if there are `problems`."""
        return model_shape(self.hf_config, self.folder, own=self.own)

    @cached_property
    def streams(self) -> dict[TokenStream, ModelStream]:
        """The streams of its tokens; most families have none.

        Raises:
            CheckpointError: the model is not supported.
            UserError: a declaration contradicts itself.
        """
        family = family_of(self.hf_config, self.own)
        if family is None or not family.streams:
            return {}
        shape = self.shape
        found: dict[TokenStream, ModelStream] = {}
        for one in family.streams:
            try:
                stream = one.declare(shape)
                stream.check_kept([other.name for other in found])
            except ValueError as problem:
                raise UserError(f"model family {family.model_type}: {problem}") from problem
            found[stream] = one
        return found

    def returned_streams(self, requested: Collection[str] = ()) -> tuple[TokenStream, ...]:
        """Return the streams that engines return, and that samples, checkpoints and recordings hold.

        Args:
            requested: names of the streams on request that the run learns with, such as "routes".

        Raises:
            UserError: see `streams`; or the model lacks a stream that is requested.
        """
        if lacking := sorted(set(requested) - {stream.name for stream in self.streams}):
            where = f"{self.folder}: " if self.folder else ""
            kind = self.hf_config["model_type"]
            raise UserError(f"{where}{kind} models have no stream {lacking[0]!r}, which the run needs")
        return tuple(stream for stream in self.streams if not stream.on_request or stream.name in requested)
