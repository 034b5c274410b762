"""The reference policy of the KL term (`loss.kl_coef`): a second model, which is never trained.

Every rank holds a second set of weights, without gradients or optimizer state, and each rollout batch costs one more
scoring pass. The reference is split like the learner, and may be any model with the same vocabulary.
"""

from pathlib import Path

from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.nn import Module, ModuleList

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.config.plan import check_reference
from bapo_megatron.config.precision import tokens_multiple
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import ConfigError
from bapo_megatron.hf.shape import load_hf_config, model_shape
from bapo_megatron.learner.hf.convert import load_weights
from bapo_megatron.learner.model import PolicyModel, transformer_config
from bapo_megatron.learner.parallel import ParallelLayout, device
from bapo_megatron.learner.precision import logprob_backend
from bapo_megatron.learner.schedule import Schedule
from bapo_megatron.types import MiniBatch


class ReferencePolicy:
    """Log-probs of a frozen policy; a `whole_batch.Scorer`. Construct it on every rank, after the learner's model.

    Args:
        started_from: the policy's own Hugging Face folder, the reference if `loss.reference_path` is unset.

    Raises:
        ConfigError: the reference has another vocabulary, or does not fit the layout.
        CheckpointError: its folder cannot be read, or its family is not supported.
    """

    def __init__(self, config: Config, started_from: Path, layout: ParallelLayout) -> None:
        path = config.loss.reference_path
        folder = started_from if path is None else resolve_model_path(path, setting="loss.reference_path")
        hf_config = load_hf_config(folder)
        if problems := [v.message for v in check_reference(config, hf_config, load_hf_config(started_from))]:
            raise ConfigError("; ".join(problems))
        self._layout = layout
        shape = model_shape(hf_config)
        settings = transformer_config(shape, config)
        self.share = layout.share(sequence_parallel=settings.sequence_parallel, tokens_multiple=tokens_multiple(config))
        chunks_of_rank, backend = range(layout.num_chunks), logprob_backend(config)
        model = ModuleList(PolicyModel(settings, shape, layout, i, backend) for i in chunks_of_rank).to(device())
        load_weights(model, shape, layout, folder)
        model.requires_grad_(False)
        chunks: list[Module] = [Float16Module(settings, c) if settings.bf16 else c for c in model.eval()]
        self._schedule = Schedule(chunks, settings, layout, config)

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor] | None:
        """See `Learner.log_probs`."""
        log_probs = self._schedule.log_probs(minibatch)
        return log_probs if self._layout.is_last_stage else None

    def sum_over_data_ranks(self, table: Tensor | None) -> Tensor:
        """See `Learner.sum_over_data_ranks`."""
        return self._layout.reduce_over_data(table)
