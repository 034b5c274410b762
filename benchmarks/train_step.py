"""One optimizer update against plain Hugging Face and torch AdamW; and the two orders of forward and backward passes.

    python benchmarks/train_step.py [hugging-face] [--turns 15]
    python benchmarks/train_step.py schedules [--turns 15]

hugging-face: a supervised update (maximum likelihood of the responses) and a BAPO update (scores, search for the
bounds, loss, Adam) of the same sequences in the same micro-batches, one process, float32. Hugging Face's side is what
a careful user writes: batches padded on the right to their longest sequence, without a mask (a causal query never
looks at padding), sdpa attention, logits of response rows only, clipping, fused AdamW. Both sides start from the
sequences, search with the same function, and their losses are compared.

schedules: the BAPO update with train.schedule "forwards_first" and "interleaved", and the peak of memory of each.

Ways take turns; the result is the median over turns of the ratio within a turn. Times are CPU seconds of this process:
with one thread they equal the wall time on an idle machine.
"""

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from logprobs import resident_bytes
from megatron.core import parallel_state
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from bapo_megatron.algorithms.clip_bounds import contribution_table, search_bounds
from bapo_megatron.assets import demo_model_path
from bapo_megatron.buffer.packing import Share, one_minibatch
from bapo_megatron.config.schema import Config
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.megatron import MegatronLearner
from bapo_megatron.learner.schedule import Schedule
from bapo_megatron.types import Batch, ClipBounds, MiniBatch

MIB = 1 << 20
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
    max_tokens: int  # of a micro-batch

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
            prompt_lens_S=torch.full_like(lens_S, self.prompt_tokens),
            advantages_T=advantages_S.repeat_interleave(lens_S) * is_response_T,
            behaviour_logprobs_T=(0.3 * noise_T - math.log(vocab_size)) * is_response_T,
            versions_T=torch.where(is_response_T, 0, -1),
            mask_T=is_response_T,
        )


ORDERS = ("forwards_first", "interleaved")
CASES = (
    Case("demo model, responses of 8 to 48 tokens", "demo", 64, 12, (8, 48), 8192),
    Case("demo model, all of 28 tokens", "demo", 64, 12, (28, 28), 8192),
    Case("256 x 4 layers, vocabulary 32k, 40 to 200 tokens", "larger", 16, 24, (40, 200), 1024),
    Case("256 x 4 layers, vocabulary 32k, all of 120 tokens", "larger", 16, 24, (120, 120), 1024),
)


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


def make_config(loss: str, case: Case, **train: Any) -> Config:
    return Config.model_validate(
        {
            "loss": {"name": loss},
            "optimizer": {"lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "clip_grad": CLIP_GRAD},
            "train": {"max_tokens_per_microbatch": case.max_tokens, **train},
        }
    )


def pack(batch: Batch, config: Config, share: Share) -> MiniBatch:
    return one_minibatch(batch, max_tokens=config.train.max_tokens_per_microbatch, share=share)


def ours(config: Config, folder: Path, case: Case) -> Update:
    learner = MegatronLearner(config, folder)
    finder = BoundsFinder(config, learner)
    batch = case.batch(learner.shape.vocab_size)

    def update() -> float:
        minibatch = pack(batch, config, learner.share)
        return learner.step(minibatch, finder.find(minibatch)).metrics["loss/policy"]

    return update


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


def take_turns(ways: dict[str, Update], num_turns: int, same: bool = True) -> dict[str, list[float]]:
    """Return the seconds of each way's updates, without the first turn. `same`: the ways should have equal losses."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    for turn in range(num_turns + 1):
        for name in sorted(ways, reverse=bool(turn % 2)):
            start = time.process_time()
            losses[name] = ways[name]()
            if turn:
                seconds[name].append(time.process_time() - start)
        first, *others = losses.values()
        assert not same or all(abs(x - first) < 1e-4 * max(1.0, abs(first)) for x in others), f"other updates: {losses}"
    return seconds


def ratio(of: list[float], to: list[float]) -> str:
    """Format the median of the turns' ratios, and their middle half."""
    ratios = [a / b for a, b in zip(of, to, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def compare_with_hugging_face(root: Path, num_turns: int, cases: list[Case]) -> None:
    print("| model and sequences | update | ours, tokens/s | Hugging Face, tokens/s | ours / Hugging Face |")
    print("|---|---|---|---|---|")
    for case in cases:
        for loss in ("sft", "bapo"):
            config = make_config(loss, case)
            theirs = HuggingFace(config, root / case.model, case)
            ways = {"ours": ours(config, root / case.model, case), "Hugging Face": theirs.update}
            seconds = take_turns(ways, num_turns)
            num_tokens = int(theirs.batch.seq_lens_S.sum())
            speeds = [num_tokens / statistics.median(seconds[name]) for name in ways]
            print(
                f"| {case.title}; {len(theirs.parts)} micro-batches | {'supervised' if loss == 'sft' else 'BAPO'} "
                f"| {speeds[0]:.0f} | {speeds[1]:.0f} | {ratio(seconds['Hugging Face'], seconds['ours'])} |",
                flush=True,
            )
            parallel_state.destroy_model_parallel()


def compare_schedules(root: Path, num_turns: int) -> None:
    print("| recompute | micro-batches | time, forwards_first / interleaved | peak MiB, forwards_first | interleaved |")
    print("|---|---|---|---|---|")
    for recompute in (False, True):
        for max_tokens in (4096, 1024):
            peaks = [measure_apart(root, order, recompute, max_tokens) / MIB for order in ORDERS]
            learner, case = schedule_learner(root, "auto", recompute, max_tokens)
            batch = case.batch(learner.shape.vocab_size)
            ways = {order: in_order(learner, batch, order) for order in ORDERS}
            seconds = take_turns(ways, num_turns, same=False)
            num_micro = len(pack(batch, learner.config, learner.share).micro_batches)
            times = ratio(seconds[ORDERS[0]], seconds[ORDERS[1]])
            print(f"| {recompute} | {num_micro} | {times} | {peaks[0]:.0f} | {peaks[1]:.0f} |", flush=True)
            parallel_state.destroy_model_parallel()


def schedule_learner(root: Path, order: str, recompute: bool, max_tokens: int) -> tuple[MegatronLearner, Case]:
    case = Case("", "larger", 24, 24, (120, 120), max_tokens)
    config = make_config("bapo", case, schedule=order, recompute=recompute)
    return MegatronLearner(config, root / case.model), case


def in_order(learner: MegatronLearner, batch: Batch, order: str) -> Update:
    """Make the update of one order; both orders share the learner and differ in nothing else."""
    train = learner.config.train.model_copy(update={"schedule": order})
    config = learner.config.model_copy(update={"train": train})
    schedule = Schedule(learner._wrapped, learner.settings, learner.layout, config)
    finder = BoundsFinder(config, learner)

    def update() -> float:
        learner._schedule = schedule
        minibatch = pack(batch, config, learner.share)
        return learner.step(minibatch, finder.find(minibatch)).metrics["loss/policy"]

    return update


def measure_apart(root: Path, order: str, recompute: bool, max_tokens: int) -> int:
    """Return an update's peak bytes, measured in its own process."""
    command = [sys.executable, __file__, "measure-memory", str(root), order, str(int(recompute)), str(max_tokens)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)


def measure_memory(root: Path, order: str, recompute: bool, max_tokens: int) -> None:
    """Print an update's peak growth in bytes; Adam's state exists already."""
    learner, case = schedule_learner(root, order, recompute, max_tokens)
    update = in_order(learner, case.batch(learner.shape.vocab_size), order)
    in_order(learner, replace(case, num_sequences=1).batch(learner.shape.vocab_size), order)()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_bytes("VmRSS")
    update()
    print(resident_bytes("VmHWM") - before)


def main() -> None:
    if sys.argv[1:2] == ["measure-memory"]:
        root, order, recompute, max_tokens = sys.argv[2:]
        measure_memory(Path(root), order, bool(int(recompute)), int(max_tokens))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("hugging-face", "schedules"), default="hugging-face")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--cases", type=int, nargs="*", default=list(range(len(CASES))), help="of hugging-face")
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} "
        f"threads, torch {torch.__version__}, transformers {transformers.__version__}, {args.turns} turns"
    )
    with tempfile.TemporaryDirectory(prefix="train-step-") as folder:
        save_larger_model(Path(folder) / "larger")
        (Path(folder) / "demo").symlink_to(demo_model_path())
        if args.what == "schedules":
            compare_schedules(Path(folder), args.turns)
        else:
            compare_with_hugging_face(Path(folder), args.turns, [CASES[i] for i in args.cases])


if __name__ == "__main__":
    main()
