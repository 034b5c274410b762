"""A run's facts, resolved once from its configuration: the engine's kind, the model, and who has which GPU.

Start at `resolve`. Rooms that start or check runs take a `Resolved`; the functions below them take the one thing that
they need: a shape, a placement, a section of the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.annotators import Annotator, own_annotators
from bapo_megatron.config.engines import EngineKind, engine_kind
from bapo_megatron.config.families import own_family
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.hf.families import Family
from bapo_megatron.hf.shape import ModelShape
from bapo_megatron.resolved.placement import Placement, place
from bapo_megatron.resolved.step_tokens import shares_prompts

if TYPE_CHECKING:
    from bapo_megatron.tokens import TokenStream


@dataclass(frozen=True)
class Resolved:
    """A configuration and what follows from it."""

    config: Config
    engine: EngineKind
    own: Family | None  # the user's own family (`model.family`)
    model: ModelFacts | None = None  # of model.path; None if it is unknown, as before it is downloaded
    teachers: Mapping[str, ModelFacts] = field(default_factory=dict)  # by path: those in the trainer that are known

    @cached_property
    def shape(self) -> ModelShape:
        """The model's, with its adapters if the run trains some. Raises CheckpointError if it is not supported."""
        assert self.model is not None, "only for runs whose model is known"
        adapters = self.config.lora.adapters
        return self.model.shape if adapters is None else self.model.shape.with_adapters(adapters)

    @property
    def uses_own_reference(self) -> bool:
        """Whether the policy itself computes the reference's log-probs, with the adapters that its run began with."""
        return self.config.lora.adapters is not None and self.config.loss.reference_path is None

    @cached_property
    def critic_shape(self) -> ModelShape:
        """The critic's, which trains all its weights. Raises CheckpointError if it is not supported."""
        assert self.model is not None, "only for runs whose model is known"
        return self.model.shape.with_value_head()

    @cached_property
    def held_teachers(self) -> list[tuple[ModelShape, float]]:
        """The shape of each teacher in the trainer, with the policy's vocabulary, or the policy's own if it is unknown;
        and its share of the prompts."""
        teacher, model = self.config.teacher, self.model
        assert model is not None, "only for runs whose model is known"
        weights = {one.name: one.weight for one in self.config.data.sources}

        def share_of(path: str) -> float:
            of_path = (weights.get(name, 0.0) for name, one in teacher.path_by_source.items() if one == path)
            return sum(of_path) / sum(weights.values()) if teacher.path is None and weights else 1.0

        def shape_of(path: str) -> ModelShape:
            facts = self.teachers.get(path, model)
            return replace((model if facts.problems else facts).shape, vocab_size=model.shape.vocab_size)

        return [(shape_of(path), share_of(path)) for path in teacher.paths.values()]

    @cached_property
    def shares_prompts(self) -> bool:
        """Whether the policy computes the prompt of several responses in a micro-batch once."""
        return shares_prompts(self.config, self.shape)

    @property
    def streams(self) -> tuple[TokenStream, ...]:
        """The streams that the run's engines return. Raises UserError: see `ModelFacts.returned_streams`."""
        from bapo_megatron.tokens import sampler_streams  # it needs torch

        if self.model is None:
            return ()
        of_sampler = sampler_streams(self.config.loss.sampler_top_k, self.model.shape.vocab_size)
        return (*self.model.returned_streams(self.config.model.requested_streams), *of_sampler)

    @cached_property
    def annotators(self) -> tuple[Annotator, ...]:
        """The annotators of the run. Raises UserError: see `own_annotators`."""
        return own_annotators(self.config, [stream.name for stream in self.model.streams] if self.model else [])

    @property
    def added_streams(self) -> dict[str, tuple[TokenStream, ...]]:
        """The streams of ended samples, by the setting that adds them: the annotators', and a teacher's that is served.
        Raises UserError."""
        from bapo_megatron.tokens import TEACHER_STREAMS  # it needs torch

        teacher = self.config.teacher
        found = {"rollout.annotators": tuple(stream for one in self.annotators for stream in one.streams)}
        return found | ({teacher.given: TEACHER_STREAMS} if teacher.is_served else {})

    @property
    def kept_streams(self) -> tuple[TokenStream, ...]:
        """All streams in samples, checkpoints and recordings: the engines' and the added ones. Raises UserError."""
        return (*self.streams, *chain.from_iterable(self.added_streams.values()))

    @property
    def folder(self) -> Path:
        """The checkpoint of model.path."""
        folder = None if self.model is None else self.model.folder
        assert folder is not None, "only for runs whose model is on this machine"
        return folder

    @cached_property
    def placement(self) -> Placement:
        return place(self.config, self.engine)

    def changed(self, config: Config) -> Resolved:
        """Return the same run with other settings, but with its engine's kind and its model."""
        return replace(self, config=config)


def resolve(
    config: Config,
    model: str | Path | dict[str, Any] | None = None,
    teachers: Mapping[str, str | Path | dict[str, Any]] | None = None,
) -> Resolved:
    """Resolve a run's facts.

    Args:
        model: the folder of model.path, or only its config.json; None if neither is known.
        teachers: the same of the teachers that the trainer holds, by path; without those that are not known.

    Raises:
        UserError: rollout.engine or model.family names something that cannot be loaded.
        CheckpointError: a folder has no readable config.json.
    """
    own = own_family(config.model.family)

    def facts(one: str | Path | dict[str, Any]) -> ModelFacts:
        return ModelFacts(one, own) if isinstance(one, dict) else ModelFacts.of(one, own)

    held = {path: facts(one) for path, one in (teachers or {}).items()}
    kind = engine_kind(config.rollout.engine)
    return Resolved(config, kind, own, None if model is None else facts(model), held)


def resolve_here(config: Config) -> Resolved:
    """Resolve a run whose models are on this machine, or on the hub. Raises like `resolve` and `resolve_model_path`."""
    teachers = {
        path: resolve_model_path(path, setting=setting, weights=False) for setting, path in config.teacher.paths.items()
    }
    return resolve(config, resolve_model_path(config.model.path), teachers)
