"""How a mini-batch passes through Megatron's schedules: scoring, forward and backward passes, and their order.

    interleaved      score (no gradient)  |  forward, backward, forward, backward, ... (pipeline stages: 1F1B)
    forwards_first   forward, forward, ...  |  backward, backward, ...
                                            ^ the bounds are found here, from the log-probs of all micro-batches

The bounds need the ratios of the whole mini-batch before the first loss. If all forward passes come first, they are the
scoring pass, and no FLOP is spent twice; but all micro-batches then keep their activations until the backward passes.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn import Module

from bapo_megatron.config.schema import Config
from bapo_megatron.learner.parallel import ParallelLayout, device
from bapo_megatron.learner.precision import logprob_backend
from bapo_megatron.runtime import memory_bytes
from bapo_megatron.runtime.heartbeat import HEARTBEAT, TRAINER
from bapo_megatron.runtime.straggler import LocalTime
from bapo_megatron.types import MicroBatch, MiniBatch


class Scores(NamedTuple):
    """What the end of a policy returns, float32."""

    log_probs_R: Tensor
    entropy_R: Tensor
    class_RX: Tensor | None = None  # log-probs of a teacher's or the sampler's likeliest tokens, and of all others
    likely_ids_RK: Tensor | None = None  # int32: these tokens, if the model was asked for its own

    @property
    def device(self) -> torch.device:
        """The device, which Megatron's schedules ask the output for if the model has experts."""
        return self.log_probs_R.device


_Outcome = TypeVar("_Outcome")
_Kept = TypeVar("_Kept")
# maps a micro-batch, then its scores (or a critic's values), to the loss, number of tokens, and an outcome to keep
LossOf = Callable[[MicroBatch], Callable[[Any], tuple[Tensor, Tensor, _Outcome]]]


@dataclass(frozen=True, slots=True)
class ForwardPasses:
    """Forward passes of a mini-batch, with the graphs for its backward passes."""

    minibatch: MiniBatch
    batches: list[tuple[MicroBatch, Scores]]  # on the device


class Schedule:
    """Runner of mini-batches in the order of `train.schedule`.

    Args:
        chunks: this rank's parts of the model, wrapped by Megatron.
        local_time: the clock of all of this rank's models, which measures the passes.
    """

    def __init__(
        self,
        chunks: Sequence[Module],
        settings: TransformerConfig,
        layout: ParallelLayout,
        config: Config,
        local_time: LocalTime,
    ) -> None:
        self._chunks = list(chunks)
        self._settings = settings
        self._layout = layout
        self._config = config
        self._local_time = local_time
        self._run_megatron = get_forward_backward_func()
        self.memory_bytes = _smallest_memory(layout)  # the least of any rank
        self.forward_time = LocalTime()  # time of forward passes that are each followed by their backward pass

    def runs_forwards_first(self, minibatch: MiniBatch) -> bool:
        """Decide for a mini-batch, the same on all ranks of a replica; see `TrainConfig.forwards_first`."""
        return self._config.train.forwards_first(
            len(minibatch.micro_batches),
            num_stages=self._config.parallel.pipeline,
            layer_input_bytes=self._layer_input_bytes(minibatch),
            memory_bytes=self.memory_bytes,
        )

    def log_probs(self, minibatch: MiniBatch) -> list[Tensor]:
        """Return log-probs without gradient; empty off the last stage."""
        return self.without_gradient(minibatch, lambda scores: scores[0])

    def without_gradient(
        self, minibatch: MiniBatch, of: Callable[[Any], _Kept], *, with_entropy: bool = False, top_k: int = 0
    ) -> list[_Kept]:
        """Return `of` the model's output for each micro-batch, without gradient; empty off the last stage.

        Args:
            top_k: number of the model's likeliest tokens to find, a policy's.
        """
        options = {"with_entropy": with_entropy} | ({"top_k": top_k} if top_k else {})
        with torch.no_grad():
            return self._forward(minibatch, lambda batch: lambda output, non_loss_data: of(output), options)

    def forward(self, minibatch: MiniBatch) -> ForwardPasses:
        """Run all forward passes and keep their graphs. Does not work with pipeline stages."""
        assert self._layout.pipeline_size == 1, "pipeline stages run micro-batches in Megatron's own order"
        batches = self._on_device(minibatch)
        scores = self._forward(minibatch, lambda batch: lambda scores, non_loss_data: scores, {"with_entropy": True})
        return ForwardPasses(minibatch, list(zip(batches, scores, strict=True)))

    def backward(self, passes: ForwardPasses, loss_of: LossOf[_Outcome]) -> list[_Outcome]:
        """Compute losses and gradients of earlier forward passes; return the outcomes of `loss_of`.

        Megatron's schedule runs as usual, with forward steps that return the scores they already have.
        """

        def forward_step(iterator: Iterator[tuple[MicroBatch, Scores]], model: Module) -> tuple[Scores, Callable]:
            batch, scores = next(iterator)
            return scores, loss_of(batch)

        return self._run(forward_step, passes.batches, passes.minibatch, forward_only=False)

    def forward_backward(self, minibatch: MiniBatch, loss_of: LossOf[_Outcome]) -> list[_Outcome]:
        """Run forward and backward passes in turn; return the outcomes, empty off the last stage."""
        return self._forward(minibatch, loss_of, {"with_entropy": True}, forward_only=False)

    def _forward(
        self, minibatch: MiniBatch, then: Callable, options: dict[str, Any], *, forward_only: bool = True
    ) -> list[Any]:
        """Run the model on each micro-batch; `then` maps the micro-batch to the function to call with its output."""

        def forward_step(iterator: Iterator[MicroBatch], model: Module) -> tuple[Any, Callable]:
            batch = next(iterator)
            with contextlib.nullcontext() if forward_only else self.forward_time.running():
                output = model(
                    batch,
                    temperature=self._config.rollout.temperature,
                    chunk_tokens=self._config.train.logprob_chunk_tokens,
                    backend=logprob_backend(self._config),
                    **options,
                )
            return Scores(*output) if isinstance(output, tuple) else output, then(batch)

        return self._run(forward_step, self._on_device(minibatch), minibatch, forward_only=forward_only)

    def _run(self, forward_step: Callable, data: list[Any], minibatch: MiniBatch, *, forward_only: bool) -> list[Any]:
        """Pass all micro-batches through Megatron's schedule; return what the loss functions keep, on the last stage.

        Gradients are summed over data and context ranks and over tied or replicated weights; the loss is already
        divided by the tokens of all ranks.
        """
        count = itertools.count(1)

        def beating_step(*arguments: Any) -> Any:
            HEARTBEAT.beat(TRAINER, f"forward step {next(count)} of {len(data) * len(self._chunks)}")
            return forward_step(*arguments)

        with self._local_time.running():  # it ends before the first collective over data ranks
            outputs = self._run_megatron(
                forward_step_func=beating_step,
                data_iterator=[iter(data) for _ in self._chunks],
                model=self._chunks,
                num_microbatches=len(data),
                seq_length=minibatch.micro_batches[0].num_tokens * self._layout.context_size,
                micro_batch_size=1,
                forward_only=forward_only,
                collect_non_loss_data=forward_only,
            )
        if not forward_only:
            finalize_model_grads(self._chunks)
        return outputs

    def _on_device(self, minibatch: MiniBatch) -> list[MicroBatch]:
        layout, packs = self._layout, minibatch.micro_batches
        for pack in packs:  # packs made for another rank would give wrong numbers, not an error
            assert int(pack.cu_seqlens_S1[-1]) == pack.num_tokens * layout.context_size, (
                "packed for other context ranks"
            )
        if layout.pipeline_size > 1:
            lengths = {pack.num_tokens for pack in packs}
            assert len(lengths) == 1, f"a pipeline's packs must all have one length, not {sorted(lengths)}"
        return [pack.to(device()) for pack in packs]

    def _layer_input_bytes(self, minibatch: MiniBatch) -> float:
        """Return the bytes that `train.recompute` of all layers keeps on this rank until the backward passes run."""
        settings = self._settings
        num_tokens = sum(batch.num_tokens for batch in minibatch.micro_batches)
        split = self._layout.tensor_size if settings.sequence_parallel else 1
        return num_tokens * settings.num_layers * settings.hidden_size * settings.params_dtype.itemsize / split


def _smallest_memory(layout: ParallelLayout) -> float:
    """Return the memory in bytes of the smallest device, or machine without GPUs. One small all-reduce."""
    own = torch.cuda.get_device_properties(device()).total_memory if torch.cuda.is_available() else memory_bytes()
    table = torch.tensor(float(own), dtype=torch.float64)
    return float(layout.reduce_over_data(table, torch.distributed.ReduceOp.MIN))
