"""What torch allocates in a real update: one process per rank, with every allocation recorded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork

from bapo_megatron.buffer.packing import one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch
from benchmarks.side_by_side import peak_allocated
from tests.distributed import HANG_S
from tests.integration.learner_reference import BOUNDS

SIZES: dict[str, Any] = {
    "vocab_size": 2001,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
PROMPT_TOKENS, RESPONSE_TOKENS, NUM_SEQUENCES = 12, 500, 4
BACKEND = "sending"
COLLECTIVE = 1  # tag of the collectives' messages
COMBINE = {dist.ReduceOp.SUM: np.add, dist.ReduceOp.MAX: np.maximum, dist.ReduceOp.MIN: np.minimum}


@dataclass(frozen=True)
class Case:
    """One measurement."""

    title: str
    family: str = "qwen3"
    parallel: dict[str, Any] = field(default_factory=dict)
    recompute: bool | dict[str, Any] = False  # or [train] recompute_layers, recompute_modules
    distributed: bool = False
    lora: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        return Config.model_validate(
            {
                "data": {"max_prompt_tokens": PROMPT_TOKENS},
                "parallel": {"timeout_s": HANG_S, **self.parallel},
                "rollout": {
                    "engine": "recorded",
                    "prompts_per_step": 1,
                    "samples_per_prompt": NUM_SEQUENCES,
                    "max_response_tokens": RESPONSE_TOKENS,
                },
                "optimizer": {"distributed": self.distributed},
                "lora": self.lora,
                "train": {
                    "logprob_chunk_tokens": 256,
                    "recompute": bool(self.recompute),
                    **(self.recompute if isinstance(self.recompute, dict) else {}),
                    "max_tokens_per_microbatch": 2 * (PROMPT_TOKENS + RESPONSE_TOKENS),
                },
            }
        )


def longest_batch() -> Batch:
    """Return a batch in which every prompt and response is as long as allowed."""
    generator = torch.Generator().manual_seed(3)
    length = PROMPT_TOKENS + RESPONSE_TOKENS
    is_response_T = (torch.arange(length) >= PROMPT_TOKENS).repeat(NUM_SEQUENCES)
    num_tokens = length * NUM_SEQUENCES
    return Batch(
        token_ids_T=torch.randint(0, SIZES["vocab_size"], (num_tokens,), generator=generator),
        seq_lens_S=torch.full((NUM_SEQUENCES,), length),
        sampled_T=is_response_T,
        advantages_T=torch.randn(num_tokens, generator=generator) * is_response_T,
        behaviour_logprobs_T=(-8.0 + torch.randn(num_tokens, generator=generator)) * is_response_T,
        versions_T=torch.where(is_response_T, 0, -1),
        mask_T=is_response_T,
    )


class SendingGroup(dist.ProcessGroup):
    """A process group whose collectives are gloo's sends and receives, finished when the call returns.

    Gloo runs its own collectives in its own threads. A tensor that such a thread is the last to hold is freed there,
    unseen by the profiler, and which thread is last depends on the load. Here only this rank's thread allocates and
    frees; values in transit are in NumPy arrays, which the profiler does not count.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._peers = [peer for peer in range(size) if peer != rank]
        self.send, self.recv = self._gloo.send, self._gloo.recv

    def getBackendName(self) -> str:
        return BACKEND

    def all_to_all_single(
        self, output: Tensor, input: Tensor, received: Sequence[int], sent: Sequence[int], _: Any
    ) -> dist.Work:
        """Exchange rows: even shares if there are no numbers of rows."""
        outgoing = input.split(list(sent)) if len(sent) else input.chunk(self.size())
        incoming = output.split(list(received)) if len(received) else output.chunk(self.size())
        return self._exchange(outgoing, incoming)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _: Any) -> dist.Work:
        return self._exchange(inputs * self.size(), outputs[0])

    def all_gather_single(self, output: Tensor, input: Tensor, _: Any) -> dist.Work:
        return self._exchange([input] * self.size(), output.chunk(self.size()))

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> dist.Work:
        return [self.all_gather_single(*pair, options) for pair in zip(outputs, inputs, strict=True)][-1]

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        return [self._reduce([tensor] * self.size(), tensor, options) for tensor in tensors][-1]

    allreduce_coalesced = allreduce

    def reduce_scatter_single(self, output: Tensor, input: Tensor, options: Any) -> dist.Work:
        return self._reduce(input.chunk(self.size()), output, options)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], options: Any) -> dist.Work:
        return [self.reduce_scatter_single(*pair, options) for pair in zip(outputs, inputs, strict=True)][-1]

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        if self.rank() == options.rootRank:
            works = [self._gloo.send(tensors, peer, COLLECTIVE) for peer in self._peers]
        else:
            works = [self._gloo.recv(tensors, options.rootRank, COLLECTIVE)]
        return _wait(works)

    def barrier(self, opts: Any) -> dist.Work:
        flags = torch.from_numpy(np.zeros((2, self.size())))
        return self._exchange(flags[0], flags[1])

    def _exchange(self, outgoing: Sequence[Tensor] | Tensor, incoming: Sequence[Tensor] | Tensor) -> dist.Work:
        """Send `outgoing[r]` to each rank r of the group, and receive `incoming[r]` from it."""
        # NumPy writes unseen by autograd, as other backends do
        incoming[self.rank()].detach().numpy()[...] = outgoing[self.rank()].detach().numpy()
        works = [self._gloo.send([outgoing[peer]], peer, COLLECTIVE) for peer in self._peers]
        return _wait(works + [self._gloo.recv([incoming[peer]], peer, COLLECTIVE) for peer in self._peers])

    def _reduce(self, outgoing: Sequence[Tensor], result: Tensor, options: Any) -> dist.Work:
        """Combine what all ranks send to this one."""
        values = result.detach().numpy()
        rows = np.empty((self.size(), *values.shape), values.dtype)
        self._exchange(outgoing, torch.from_numpy(rows))
        values[...] = COMBINE[options.reduceOp.op].reduce(rows)
        return FakeWork()


def _wait(works: list[dist.Work]) -> dist.Work:
    for work in works:
        work.wait()
    return FakeWork()


dist.Backend.register_backend(BACKEND, SendingGroup, devices=["cpu"])


def measure(rank: int, world_size: int, root: Path, case: Case) -> None:
    """Write this rank's peak in bytes: the largest sum, from before the model exists to the end of the second update.

    Anything that ran earlier in the same process would change it, so each measurement has a new process.
    """
    config, batch = case.config(), longest_batch()

    def update_twice() -> None:
        learner = MegatronLearner(resolve(config, root / case.family))
        minibatch = one_minibatch(batch, max_tokens=config.train.max_tokens_per_microbatch, share=learner.share)
        for _ in range(2):
            learner.step(minibatch, BOUNDS)

    (root / f"peak-{rank}").write_text(str(peak_allocated(update_twice)))
