"""One optimizer update against plain Hugging Face and torch AdamW, and the two orders of forward and backward passes.

    python -m benchmarks.train_step [--quick]

Against Hugging Face: a supervised update (maximum likelihood of the responses) and a BAPO update (scores, search for
bounds, loss, Adam) with the same sequences in the same micro-batches, in one process, in float32. The Hugging Face side
is what a careful user would write: batches padded on the right to their longest sequence, without a mask (a causal
query never sees padding), sdpa attention, logits of response rows only, clipping, fused AdamW. Both sides start from
the sequences, search with the same function, and must have equal losses in every turn. Times are CPU seconds.

Schedules: the BAPO update with train.schedule "forwards_first" and "interleaved", compared in time and peak memory.
"""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bapo_megatron.algorithms.clip_bounds import contribution_table, search_bounds
from bapo_megatron.assets import demo_model_path
from bapo_megatron.buffer.packing import Share, one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import plural
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.schedule import Schedule
from bapo_megatron.resolved import resolve
from bapo_megatron.types import Batch, ClipBounds, MiniBatch
from benchmarks.side_by_side import MIB, Row, Rows, Turns, main, resident_bytes, same, take_turns

LR, BETAS, CLIP_GRAD = 1e-5, (0.9, 0.95), 1.0
Update = Callable[[], float]  # one optimizer update; returns its loss


@dataclass(frozen=True)
class Case:
    """A model, and the lengths of an update's sequences."""

    title: str
    model: str  # "demo" or "larger"
    num_sequences: int
    prompt_tokens: int
    response_tokens: tuple[int, int]  # shortest and longest
    max_tokens: int  # per micro-batch

    def part(self, num_parts: int) -> "Case":
        """Return the case with a fraction of the sequences, in equally many micro-batches."""
        return replace(self, num_sequences=self.num_sequences // num_parts, max_tokens=self.max_tokens // num_parts)

    def batch(self, vocab_size: int) -> Batch:
        generator = torch.Generator().manual_seed(0)
        shortest, longest = self.response_tokens
        responses_S = torch.randint(shortest, longest + 1, (self.num_sequences,), generator=generator)
        lens_S = responses_S + self.prompt_tokens
        num_tokens = int(lens_S.sum())
        is_response_T = torch.cat([torch.arange(n) >= self.prompt_tokens for n in lens_S.tolist()])
        noise_T = torch.randn(num_tokens, generator=generator)
        advantages_S = torch.randn(self.num_sequences, generator=generator)
        return Batch(
            token_ids_T=torch.randint(1, vocab_size, (num_tokens,), generator=generator),  # 0 pads the demo's
            seq_lens_S=lens_S,
            sampled_T=is_response_T,
            advantages_T=advantages_S.repeat_interleave(lens_S) * is_response_T,
            behaviour_logprobs_T=(0.3 * noise_T - math.log(vocab_size)) * is_response_T,
            versions_T=torch.where(is_response_T, 0, -1),
            mask_T=is_response_T,
        )


ORDERS = ("forwards_first", "interleaved")
UPDATES = {"sft": "supervised", "bapo": "BAPO"}
HUGGING_FACE = "Hugging Face and torch AdamW"
CASES = (
    Case("demo model, responses of 8 to 48 tokens", "demo", 64, 12, (8, 48), 8192),
    Case("demo model, all of 28 tokens", "demo", 64, 12, (28, 28), 8192),
    Case("256 x 4 layers, vocabulary 32k, 40 to 200 tokens", "larger", 16, 24, (40, 200), 1024),
    Case("256 x 4 layers, vocabulary 32k, all of 120 tokens", "larger", 16, 24, (120, 120), 1024),
)
SCHEDULE_CASE = Case("", "larger", 24, 24, (120, 120), 4096)


def save_larger_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_config(loss: str, case: Case, lr: float = LR, num_ranks: int = 1, **train: Any) -> Config:
    return Config.model_validate(
        {
            "loss": {"name": loss},
            "optimizer": {"lr": lr, "beta1": BETAS[0], "beta2": BETAS[1], "clip_grad": CLIP_GRAD},
            "parallel": {"data": num_ranks},
            "train": {"max_tokens_per_microbatch": case.max_tokens, **train},
        }
    )


def pack(batch: Batch, config: Config, share: Share) -> MiniBatch:
    return one_minibatch(batch, max_tokens=config.train.max_tokens_per_microbatch, share=share)


def update_of(learner: MegatronLearner, batch: Batch) -> Update:
    finder = BoundsFinder(learner.config, learner)

    def update() -> float:
        minibatch = pack(batch, learner.config, learner.share)
        return learner.step(minibatch, finder.find(minibatch)).metrics["loss/policy"]

    return update


def ours(config: Config, folder: Path, case: Case) -> Update:
    learner = MegatronLearner(resolve(config, folder))
    return update_of(learner, case.batch(learner.shape.vocab_size))


class HuggingFace:
    """The same updates in plain transformers."""

    def __init__(self, config: Config, folder: Path, case: Case) -> None:
        self.config = config
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
        self.batch = case.batch(self.model.config.vocab_size)
        self.starts = (self.batch.seq_lens_S.cumsum(0) - self.batch.seq_lens_S).tolist()
        self.parts = self._parts()

    def _parts(self) -> list[list[int]]:
        """Return the sequences in each of our micro-batches."""
        minibatch = pack(self.batch, self.config, Share())
        starts = torch.tensor(self.starts)
        found = []
        for micro in minibatch.micro_batches:
            sequences = torch.searchsorted(starts, micro.batch_rows_R, right=True) - 1
            found.append(sequences.unique().tolist())
        return found

    def padded(self, part: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return token ids [S, L], rows that predict a response token [S, L - 1], behaviour log-probs, advantages."""
        ids, rows, places = [], [], []
        for sequence in part:
            start, length = self.starts[sequence], int(self.batch.seq_lens_S[sequence])
            place = torch.arange(start, start + length)
            ids.append(self.batch.token_ids_T[place])
            rows.append(self.batch.mask_T[place[1:]])
            places.append(place[1:][rows[-1]])
        place_R = torch.cat(places)
        return (
            pad_sequence(ids, batch_first=True),
            pad_sequence(rows, batch_first=True),
            self.batch.behaviour_logprobs_T[place_R],
            self.batch.advantages_T[place_R],
        )

    def log_probs(self, ids: Tensor, rows: Tensor) -> Tensor:
        hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits_RV = self.model.lm_head(hidden[:, :-1][rows])
        return logits_RV.log_softmax(-1).gather(1, ids[:, 1:][rows][:, None])[:, 0]

    def update(self) -> float:
        parts = [self.padded(part) for part in self.parts]
        num_tokens = sum(int(rows.sum()) for _, rows, _, _ in parts)
        bounds = self.bounds(parts) if self.config.loss.name == "bapo" else None
        self.optimizer.zero_grad()
        total = 0.0
        for ids, rows, behaviour_R, advantages_R in parts:
            log_probs_R = self.log_probs(ids, rows)
            if bounds is None:
                loss = -log_probs_R.sum() / num_tokens
            else:
                ratio_R = (log_probs_R - behaviour_R).exp()
                clipped_R = ratio_R.clamp(bounds.low, bounds.high)
                loss = -torch.minimum(ratio_R * advantages_R, clipped_R * advantages_R).sum() / num_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        return total

    def bounds(self, parts: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> ClipBounds:
        bapo, tables = self.config.bapo, []
        with torch.no_grad():
            for ids, rows, behaviour_R, advantages_R in parts:
                ratio_R = (self.log_probs(ids, rows) - behaviour_R).exp()
                everything = torch.ones_like(ratio_R, dtype=torch.bool)
                tables.append(contribution_table(ratio_R, advantages_R, everything, behaviour_R, bapo))
        return search_bounds(torch.stack(tables).sum(0), bapo)


def rows(quick: bool) -> Rows:
    """Compare updates with Hugging Face's, then the two schedules with each other."""
    num_turns, parts = (5, 3) if quick else (15, 1)
    with tempfile.TemporaryDirectory(prefix="train-step-") as folder:
        root = Path(folder)
        save_larger_model(root / "larger")
        (root / "demo").symlink_to(demo_model_path())
        for case in CASES:
            size = parts if case.model == "larger" else 1
            for loss in UPDATES:
                yield against_hugging_face(root, case.part(size), loss, num_turns)
        for recompute, max_tokens in ((False, 4096), (False, 1024), (True, 4096)):
            if not quick or not recompute:
                case = SCHEDULE_CASE.part(parts)
                yield from against_interleaved(
                    root, replace(case, max_tokens=max_tokens // parts), recompute, num_turns
                )


def against_hugging_face(root: Path, case: Case, loss: str, num_turns: int) -> Row:
    config = make_config(loss, case)
    theirs = HuggingFace(config, root / case.model, case)
    ways = {"ours": ours(config, root / case.model, case), HUGGING_FACE: theirs.update}
    turns = take_turns(ways, num_turns, agree=same(1e-4))
    parallel_state.destroy_model_parallel()
    num_micro = len(theirs.parts)
    batches = plural(num_micro, "micro-batch")
    return turns.row(f"{UPDATES[loss]} update, {case.title}; {batches}", HUGGING_FACE)


def against_interleaved(root: Path, case: Case, recompute: bool, num_turns: int) -> Rows:
    """Yield the ratios of time and memory. The orders share a learner, which continues to learn, so losses differ."""
    learner = schedule_learner(root, case, "auto", recompute)
    batch = case.batch(learner.shape.vocab_size)
    turns = take_turns({order: in_order(learner, batch, order) for order in ORDERS}, num_turns)
    num_micro = len(pack(batch, learner.config, learner.share).micro_batches)
    parallel_state.destroy_model_parallel()
    title = f"forwards first, {plural(num_micro, 'micro-batch')}, {'' if recompute else 'no '}recomputation"
    yield turns.row(f"time, {title}", "interleaved")
    load_before, peaks = os.getloadavg()[0], {}
    for order in ORDERS:
        peaks[order] = [measure_apart(root, case, order, recompute) / MIB]
    yield Turns(peaks, load_before, os.getloadavg()[0]).row(f"peak of memory, {title}", "interleaved", unit="MiB")


def schedule_learner(root: Path, case: Case, order: str, recompute: bool) -> MegatronLearner:
    return MegatronLearner(resolve(make_config("bapo", case, schedule=order, recompute=recompute), root / case.model))


def in_order(learner: MegatronLearner, batch: Batch, order: str) -> Update:
    """Return the update in one order; both orders share the learner, and nothing else differs."""
    train = learner.config.train.model_copy(update={"schedule": order})
    config = learner.config.model_copy(update={"train": train})
    schedule = Schedule(learner.wrapped, learner.settings, learner.layout, config, learner.local_time)
    finder = BoundsFinder(config, learner)

    def update() -> float:
        learner.schedule = schedule
        minibatch = pack(batch, config, learner.share)
        return learner.step(minibatch, finder.find(minibatch)).metrics["loss/policy"]

    return update


def measure_apart(root: Path, case: Case, order: str, recompute: bool) -> int:
    """Return an update's peak bytes, measured in a separate process."""
    sizes = [str(case.num_sequences), str(case.max_tokens)]
    command = [sys.executable, "-m", "benchmarks.train_step", "peak", str(root), order, str(int(recompute)), *sizes]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout.split()[-1])


def measure_memory(root: Path, case: Case, order: str, recompute: bool) -> None:
    """Print an update's peak growth in bytes, once Adam's state exists."""
    learner = schedule_learner(root, case, order, recompute)
    update = in_order(learner, case.batch(learner.shape.vocab_size), order)
    in_order(learner, replace(case, num_sequences=1).batch(learner.shape.vocab_size), order)()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_bytes("VmRSS")
    update()
    print(resident_bytes("VmHWM") - before)


if __name__ == "__main__":
    if sys.argv[1:2] == ["peak"]:
        root, order, recompute, num_sequences, max_tokens = sys.argv[2:]
        case = replace(SCHEDULE_CASE, num_sequences=int(num_sequences), max_tokens=int(max_tokens))
        torch.set_num_threads(1)
        measure_memory(Path(root), case, order, bool(int(recompute)))
    else:
        main(__doc__, rows)
