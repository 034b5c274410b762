"""Through the Megatron learner and back: shared by the tests of Hugging Face checkpoints."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state
from safetensors.torch import load_file
from torch import Tensor

from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.families import own_family
from bapo_megatron.config.schema import CheckpointConfig, Config
from bapo_megatron.convert import convert
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.resolved import resolve
from bapo_megatron.types import MicroBatch, MiniBatch
from tests.distributed import HANG_S, run_distributed

TEMPERATURE = 0.8
SEQ_LENS = (41, 1, 12)
TOLERANCE = 1e-5
PADDING_VALUE = 9.0  # for vocabulary rows that have no token: a logit of this size would take all probability


def make_config(layout: dict[str, Any], family: str = "auto") -> Config:
    return Config.model_validate(
        {
            "model": {"family": family},
            "parallel": {"timeout_s": HANG_S, **layout},
            "rollout": {"temperature": TEMPERATURE},
            "train": {"logprob_chunk_tokens": 13},
        }
    )


def token_ids(vocab_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in SEQ_LENS]


def packed(sequences: list[Tensor]) -> MiniBatch:
    """Put all sequences into one pack; every token except the first of each is predicted."""
    lengths = torch.tensor([0] + [len(s) for s in sequences])
    ends_S1 = lengths.cumsum(0)
    starts = torch.zeros(int(ends_S1[-1]), dtype=torch.bool)
    starts[ends_S1[:-1]] = True
    rows_R = (~starts).nonzero()[:, 0] - 1
    ids_T = torch.cat(sequences)
    zeros_R = torch.zeros(len(rows_R))
    advantages_R = torch.linspace(-1, 1, len(rows_R))
    batch = MicroBatch(
        token_ids_T=ids_T,
        position_ids_T=torch.cat([torch.arange(len(s)) for s in sequences]),
        cu_seqlens_S1=ends_S1.int(),
        rows_R=rows_R,
        sequence_R=torch.searchsorted(ends_S1, rows_R, right=True) - 1,
        batch_rows_R=rows_R + 1,
        targets_R=ids_T[rows_R + 1],
        advantages_R=advantages_R,
        behaviour_logprobs_R=zeros_R,
        versions_R=zeros_R.long(),
        mask_R=zeros_R == 0,
    )
    return MiniBatch((batch,), len(rows_R))


def fill_padding(learner: MegatronLearner) -> None:
    """Give the rows that pad the vocabulary a value that would show if any result depended on them."""
    shard = learner.model[-1].shard
    for name, parameter in learner.model.named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            with torch.no_grad():
                parameter[max(shard.vocab_size - shard.start, 0) :] = PADDING_VALUE


def scores(learner: MegatronLearner, minibatch: MiniBatch) -> tuple[Tensor, Tensor] | None:
    """Return logits [R, vocabulary], from the input of the model's head, and log-probs [R]; None off the last stage."""
    seen: list[Tensor] = []
    last = learner.model[-1]
    if last.post_process:
        last.output_layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0] @ inputs[1].T))
    log_probs = learner.log_probs(minibatch)
    if not log_probs:
        return None
    (part_RV,) = seen
    parts = [torch.empty_like(part_RV) for _ in range(learner.layout.tensor_size)]
    dist.all_gather(parts, part_RV.contiguous(), group=learner.layout.tensor_group)
    return torch.cat(parts, dim=1)[:, : learner.shape.vocab_size] / learner.shape.logits_scale, log_probs[0]


def check_model(folder: Path, layout: dict[str, Any], tolerance: float, family: str = "auto") -> None:
    """Load, compare with what transformers computed, save to <folder>-saved, export to <folder>-exported."""
    config = make_config(layout, family)
    learner = MegatronLearner(resolve(config, folder))
    fill_padding(learner)
    want = torch.load(folder.with_suffix(".pt"), weights_only=True)
    minibatch = packed(token_ids(learner.shape.vocab_size))
    result = scores(learner, minibatch)
    assert (result is not None) == learner.layout.is_last_stage
    if result is not None:
        logits_RV, log_probs_R = result
        torch.testing.assert_close(logits_RV, want["logits"], rtol=0, atol=tolerance)
        all_log_probs = (want["logits"] / TEMPERATURE).log_softmax(-1)
        targets_R = minibatch.micro_batches[0].targets_R
        torch.testing.assert_close(
            log_probs_R, all_log_probs.gather(1, targets_R[:, None])[:, 0], rtol=0, atol=tolerance
        )
    store = CheckpointStore(folder.with_name(f"{folder.name}-saved"), CheckpointConfig())
    saved = store.save(1, {"learner": learner}, None)
    if learner.layout.rank == 0:
        convert(saved, folder.with_name(f"{folder.name}-exported"), own=own_family(config.model.family))
    parallel_state.destroy_model_parallel()


def check_models_of_rank(
    rank: int, world_size: int, root: Path, names: list[str], layout: dict[str, Any], tolerance: float
) -> None:
    for name in names:
        try:
            check_model(root / name, layout, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}, {layout}") from error


@torch.no_grad()
def write_reference(model: transformers.PreTrainedModel, folder: Path) -> None:
    """Save transformers' logits as float32, at all positions except the last of each sequence."""
    logits = [model(ids[None]).logits[0, :-1].float() for ids in token_ids(model.config.vocab_size)]
    torch.save({"logits": torch.cat(logits)}, folder.with_suffix(".pt"))


def weights_of(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def check_exported(folder: Path) -> Path:
    """Check that `bapo convert` exports what the learner was given, bit for bit; return the exported folder."""
    target = folder.with_name(f"{folder.name}-exported")
    original, exported = weights_of(folder), weights_of(target)
    assert exported.keys() == original.keys()
    for name, weight in original.items():
        assert exported[name].dtype == weight.dtype
        assert torch.equal(exported[name], weight), name
    return target


def check_saved(folder: Path) -> None:
    """Check what `bapo convert` exports, and that transformers loads it unchanged."""
    _, info = transformers.AutoModelForCausalLM.from_pretrained(check_exported(folder), output_loading_info=True)
    assert not any(info.values()), info


def check_models(root: Path, names: list[str], layout: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    """Send each <root>/<name>, next to the reference that `write_reference` made, through a learner of this layout.

    Args:
        tolerance: the largest absolute difference of logits and log-probs.
    """
    num_processes = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("data", 1)
    run_distributed(check_models_of_rank, num_processes, root, names, layout, tolerance)
    for name in names:
        check_saved(root / name)
