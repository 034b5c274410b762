"""What transformers computes in float32 for the samples of a campaign, to check their log-probs and routes.

Samples have one trajectory. A row of routes lies with the token that follows the one it was chosen for.

Shape legend: T tokens of a sample without the first, L layers, X experts of a layer, C experts that a token chooses
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.types import Sample, Sampled

TOLERANCE = 1e-4  # of log-probs and of routers' logits

ModelOf = Callable[[int], Any]
"""Returns transformers' model with the weights of a version; it may be the one that was returned before."""


@dataclass
class Checked:
    """Tokens that are what they claim to be, in segments: tokens of one sample and one version."""

    num_tokens: int = 0
    num_unsure: int = 0  # tokens left out, because rounding may choose the experts before them
    worst: float = 0.0  # largest difference
    num_segments: int = 0
    num_betrayed: int = 0  # segments that another version's weights do not give

    @property
    def betrayed(self) -> float:
        """The share of segments that would have been noticed with other weights."""
        return self.num_betrayed / self.num_segments

    def add(self, name: str, is_sure_N: Tensor, right_N: Tensor, wrong_N: Tensor) -> None:
        """Add a segment: its tokens' differences from the right weights and from other ones."""
        self.num_unsure += int((~is_sure_N).sum())
        if not is_sure_N.any():
            return
        difference = float(right_N[is_sure_N].max())
        assert difference < TOLERANCE, f"{name} are off by {difference}"
        self.num_tokens += int(is_sure_N.sum())
        self.worst = max(self.worst, difference)
        self.num_segments += 1
        self.num_betrayed += float(wrong_N[is_sure_N].max()) > TOLERANCE


@dataclass
class Computed:
    """What a model computes for a sample."""

    logprobs_T: Tensor  # float32
    experts_TLC: Tensor  # int64, sorted: chosen for the token before; a dense model has none
    is_sure_T: Tensor  # whether no router so far chooses between experts that are closer than TOLERANCE


def check_logprobs(model_of: ModelOf, samples: Sequence[Sample], temperature: float) -> Checked:
    """Check each sampled token's log-prob against the version that its segment claims."""
    checked, versions = Checked(), [_versions(sample) for sample in samples]
    for version, sample, is_mine_T, right, wrong in _compared(model_of, samples, versions, temperature):
        said_T = torch.zeros(len(is_mine_T))
        said_T[_versions(sample) >= 0] = torch.tensor(sample.behaviour_logprobs)
        right_T, wrong_T = ((said_T - one.logprobs_T).abs() for one in (right, wrong))
        name = f"{sample.sample_id}: tokens of version {version}"
        checked.add(name, right.is_sure_T[is_mine_T], right_T[is_mine_T], wrong_T[is_mine_T])
    return checked


def check_routes(model_of: ModelOf, samples: Sequence[Sample]) -> Checked:
    """Check each row of routes against the version that read its token; differences are 0 or 1.

    It sampled the next token, or the first one behind given tokens. All samples of a group share the prompt's rows,
    which came with its first reply.
    """
    checked, begun = Checked(), dict[int, int]()
    samples = [sample for sample in samples if sample.num_sampled_tokens]
    for sample in samples:
        first = int(sample.versions[0])
        begun[id(sample.prompt)] = min(first, begun.get(id(sample.prompt), first))
    readers = [_readers(sample, begun[id(sample.prompt)]) for sample in samples]
    for version, sample, is_mine_T, right, wrong in _compared(model_of, samples, readers):
        rows = [torch.tensor(rows) for segment in sample.trajectories[0].segments for rows in segment.rows.values()]
        said_TLC = torch.full_like(right.experts_TLC, -1)
        said_TLC[: sum(map(len, rows)) - 1] = torch.cat(rows)[1:].sort(-1).values
        right_T, wrong_T = ((said_TLC != one.experts_TLC).any(2).any(1).float() for one in (right, wrong))
        name = f"{sample.sample_id}: routes of version {version}"
        checked.add(name, right.is_sure_T[is_mine_T], right_T[is_mine_T], wrong_T[is_mine_T])
    return checked


def _versions(sample: Sample) -> Tensor:
    """Return the version that sampled each token, int64 [T]; -1 for given tokens."""
    segments = sample.trajectories[0].segments
    versions = [s.origin.version if isinstance(s.origin, Sampled) else -1 for s in segments]
    return torch.tensor(versions).repeat_interleave(torch.tensor([s.num_tokens for s in segments]))[1:]


def _readers(sample: Sample, of_prompt: int) -> Tensor:
    """Return the version that read the token before each one, int64 [T]; -1 for given tokens that none has read."""
    readers_T, num_prompt = _versions(sample), len(sample.prompt.token_ids) - 1
    for place in reversed(range(num_prompt, len(readers_T) - 1)):
        if readers_T[place] < 0:
            readers_T[place] = readers_T[place + 1]
    readers_T[:num_prompt] = of_prompt
    return readers_T


def _compared(
    model_of: ModelOf, samples: Sequence[Sample], versions: Sequence[Tensor], temperature: float = 1.0
) -> Iterator[tuple[int, Sample, Tensor, Computed, Computed]]:
    """Yield each version with each sample that has it: which tokens, and what its weights and others compute."""
    known = sorted({*torch.cat([*versions]).tolist()} - {-1})
    for index, version in enumerate(known):
        masks = [versions_T == version for versions_T in versions]
        mine = [(sample, mask_T) for sample, mask_T in zip(samples, masks, strict=True) if mask_T.any()]
        right, wrong = (
            [*_computed(model_of(v), [sample for sample, _ in mine], temperature)] for v in (version, known[index - 1])
        )
        for (sample, mask_T), one, other in zip(mine, right, wrong, strict=True):
            yield version, sample, mask_T, one, other


def _computed(model: Any, samples: Sequence[Sample], temperature: float) -> Iterator[Computed]:
    num_chosen = getattr(model.config, "num_experts_per_tok", 0)
    options = {"output_router_logits": True} if num_chosen else {}
    for begin in range(0, len(samples), 64):
        some = samples[begin : begin + 64]
        rows = [torch.tensor(sample.trajectories[0].token_ids.tolist()) for sample in some]
        token_ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.inference_mode():
            out = model(token_ids_BT, **options)
        next_ids_BT1 = token_ids_BT[:, 1:, None]
        logprobs_BT = (out.logits.float() / temperature).log_softmax(-1)[:, :-1].gather(2, next_ids_BT1)[:, :, 0]
        experts_BTLC, is_sure_BT = next_ids_BT1.new_empty(*logprobs_BT.shape, 0, 0), logprobs_BT < torch.inf
        if num_chosen:
            scores_BTLX = torch.stack([*out.router_logits], 1).unflatten(0, token_ids_BT.shape)[:, :-1]
            best = scores_BTLX.topk(num_chosen + 1)
            experts_BTLC = best.indices[..., :-1].sort(-1).values
            is_sure_BT = (best.values[..., -2] - best.values[..., -1] > TOLERANCE).all(-1).cumprod(1).bool()
        for row, ids in enumerate(rows):
            end = len(ids) - 1
            yield Computed(logprobs_BT[row, :end], experts_BTLC[row, :end], is_sure_BT[row, :end])
