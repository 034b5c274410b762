"""A model's streams and a step's stream, each declared only here, followed all the way to the loss.

engine -> pieces from three weight versions, with given tokens between them -> checkpoint -> kill -> resume -> packs of
TP2 x CP2 x PP2 -> loss. Every row is compared with the row that its engine, or the learner, computed.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bapo_megatron.algorithms.losses import LossInputs, TokenLoss
from bapo_megatron.assets import demo_model_path
from bapo_megatron.buffer.packing import context_tokens
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.base import Section
from bapo_megatron.config.losses import Loss, StepStream
from bapo_megatron.hf.families import FAMILIES
from bapo_megatron.hf.streams import ModelStream, ServedTokens
from bapo_megatron.resolved import resolve
from bapo_megatron.rollout.book import groups_of
from bapo_megatron.rollout.recorded import read_groups
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import Ended, MicroBatch, MiniBatch, NeedsEnvironment, NeedsTokens, Sample, Sampled
from tests.integration.gates import Gates
from tests.integration.killable import Attempt, Engine, small_run

HERE = "tests.integration.test_streams"
NUM_LAYERS = 4  # the demo has four
LAYERS = ([0, 1], [2, 3])  # by stage
GIVEN = (5, 9, 3)
MAX_RESPONSE = 30
NUM_STEPS, KILLED_AFTER = 7, 3


def mark(token: Any, position: Any, layer: Any, version: Any) -> tuple[Any, Any]:
    """Return the row of a token that was an input."""
    return (31 * token + 7 * position + 57 * layer) % 256, (16 * layer + version + 1) % 256


def marks(tokens: ServedTokens) -> Tensor:
    first_BT, second = mark(tokens.token_ids_BT, tokens.positions_BT, tokens.layer, tokens.version)
    return torch.stack([first_BT, torch.full_like(first_BT, second)], -1)


def stamps(tokens: ServedTokens) -> Tensor:
    """Return each sampled token and the version that sampled it."""
    return torch.stack([tokens.token_ids_BT, torch.full_like(tokens.token_ids_BT, tokens.version)], -1)


FAMILY = replace(
    FAMILIES["qwen3"],
    streams=(
        ModelStream(
            lambda shape: TokenStream("marks", "uint8", (shape.num_layers, 2), on="fed", to="owner's stage"), marks
        ),
        ModelStream(lambda shape: TokenStream("stamps", "int64", (2,)), stamps),
    ),
)
SCORES = TokenStream("scores", "int64", (3,), missing=-1, kept=False)


class Options(Section):
    """Options of the loss."""

    folder: str  # where each rank records what it has compared


class Witness:
    """A check of the rows in a rank's micro-batches, with counts."""

    def __init__(self, config: Any, learner: Any) -> None:
        self.layout, self.learner = learner.layout, learner
        self.layers = LAYERS[self.layout.pipeline_rank] if self.layout.pipeline_size == 2 else [*range(NUM_LAYERS)]
        self.file = Path(config.loss.options["folder"], f"rank-{self.layout.rank}-{os.getpid()}.jsonl")

    def scores(self, minibatch: MiniBatch) -> list[Tensor]:
        """Return the step's stream: version of the step, token and version of each sampled token."""
        for batch in minibatch.micro_batches:
            self.compare("scores", batch, self.learner.sum_over_context)
        packs = minibatch.micro_batches if self.layout.is_last_stage else ()
        return [
            torch.stack([torch.full_like(mb.versions_R, self.learner.version), mb.targets_R, mb.versions_R], -1)
            for mb in packs
        ]

    def compare(self, where: str, batch: MicroBatch, over_context: Callable[[Tensor], Tensor]) -> None:
        """Check that each input of a sequence up to its last sampled token has the row of this stage's layers."""
        cu_seqlens = batch.cu_seqlens_S1.tolist()
        place_T = context_tokens(batch.cu_seqlens_S1, self.layout.context_rank, self.layout.context_size)
        table_T = torch.zeros(cu_seqlens[-1], dtype=torch.float64)  # version + 1 of sampled tokens, in the whole pack
        table_T[place_T[batch.rows_R] + 1] = batch.versions_R.double() + 1
        versions = (over_context(table_T).long() - 1).tolist()
        rows, num_given = batch.named("marks").tolist(), 0
        for at, place in enumerate(place_T.tolist()):
            start, end = next((a, b) for a, b in pairwise(cu_seqlens) if b > place)
            later = [version for version in versions[place + 1 : end] if version >= 0]
            token, position = int(batch.token_ids_T[at]), int(batch.position_ids_T[at])
            expected = [[*mark(token, position, layer, later[0])] if later else [0, 0] for layer in self.layers]
            assert rows[at] == expected, f"{where}: token {token} at {position}"
            num_given += bool(later) and versions[place + 1] < 0 and any(v >= 0 for v in versions[start:place])
        self.write(where, num_given)

    def write(self, where: str, num_given: int) -> None:
        with self.file.open("a") as file:
            found = {"rank": self.layout.rank, "stage": self.layout.pipeline_rank, "where": where, "given": num_given}
            file.write(json.dumps(found) + "\n")


WITNESS: list[Witness] = []


def make_scores(config: Any, learner: Any) -> Callable[[MiniBatch], list[Tensor]]:
    WITNESS.append(Witness(config, learner))
    return WITNESS[-1].scores


def loss(inputs: LossInputs, options: Options) -> TokenLoss:
    """Maximise the log-prob of tokens with a positive advantage, and check the streams that came with them."""
    batch, witness = inputs.batch, WITNESS[-1]
    witness.compare("loss", batch, inputs.over_context)
    version = witness.learner.version - witness.learner.version % 2  # at the start of the step, which has two updates
    expected = torch.stack([torch.full_like(batch.versions_R, version), batch.targets_R, batch.versions_R], -1)
    assert torch.equal(batch.extra[SCORES], expected)
    assert torch.equal(batch.named("stamps"), expected[:, 1:])
    return inputs.plain(torch.where(batch.mask_R, -batch.advantages_R * inputs.log_probs_R, 0.0))


LOSS = Loss(loss, streams=(StepStream(SCORES, make_scores),))


class TwoTurns:
    """A driver that answers the first turn of each sample with given tokens; the second turn ends it."""

    by_group = False
    deadline_s = 1.0
    first_need = NeedsTokens()

    def __init__(self, judge: object, deadline_s: float) -> None:
        """Take the arguments of the driver that it replaces."""

    async def advance(self, samples: Sequence[Sample]) -> list[Sample]:
        return [self.answered(sample) for sample in samples]

    def answered(self, sample: Sample) -> Sample:
        assert isinstance(sample.need, NeedsEnvironment)
        if not sample.num_given_tokens and sample.num_sampled_tokens < MAX_RESPONSE:
            return sample.answered(GIVEN)
        return replace(sample, need=Ended(sample.need.turn_end, float(sample.num_sampled_tokens % 2)))


def take_turns() -> None:
    """Let this rank's samples take two turns."""
    from bapo_megatron.rollout import manager

    manager.JudgeOnce = TwoTurns  # type: ignore[misc]


def compare(sample: Sample) -> bool:
    """Check that a sample has the engine's rows, except for tokens without a reply; return whether all have one."""
    (trajectory,) = sample.trajectories
    ids, versions, rows = trajectory.token_ids.tolist(), [], []
    for segment in trajectory.segments:
        origin = segment.origin
        versions += [origin.version if isinstance(origin, Sampled) else None] * segment.num_tokens
        named = {stream.name: values for stream, values in segment.rows.items()}
        if isinstance(origin, Sampled):
            assert named["stamps"].tolist() == [[token, origin.version] for token in segment.token_ids.tolist()]
        else:
            assert "stamps" not in named
        found = named.get("marks")
        rows += [None] * segment.num_tokens if found is None else found.tolist()
    for i in range(1, len(ids)):
        later = [version for version in versions[i:] if version is not None]
        expected = [[*mark(ids[i - 1], i - 1, layer, later[0])] for layer in range(NUM_LAYERS)] if later else None
        assert rows[i] == expected, f"{sample.sample_id}, token {i}"
    return None not in rows


def saved_in(run: Path, step: int, streams: Sequence[TokenStream]) -> dict[str, Sample]:
    state = CheckpointStore.load(run / "checkpoints" / f"step-{step:06d}", {})["rollout"]
    return {s.sample_id: s for groups in groups_of(state, streams) for g in groups for s in g.samples}


def records(folder: Path) -> Iterator[dict[str, Any]]:
    for file in folder.glob("rank-*.jsonl"):
        yield from map(json.loads, file.read_text().splitlines())


def test_declared_streams_reach_the_loss_row_by_row(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    settings = (
        "rollout.prompts_per_step=1",
        "rollout.samples_per_prompt=3",
        "rollout.groups_in_flight=5",
        "rollout.tokens_per_round=2",
    )
    settings += (f"rollout.max_response_tokens={MAX_RESPONSE}", "rollout.record=true", f"train.num_steps={NUM_STEPS}")
    settings += ("parallel.tensor=2", "parallel.context=2", "parallel.pipeline=2", "train.max_tokens_per_microbatch=40")
    settings += (f"model.family={HERE}:FAMILY", f"loss.name={HERE}:LOSS", f"loss.options.folder={tmp_path / 'seen'}")
    config = small_run(tmp_path, "run", *settings)
    streams = resolve(config, demo_model_path()).streams
    engine = Engine(tmp_path / "engine", "--family", config.model.family)
    try:
        with Attempt(config, engine, Gates(tmp_path / "gates", KILLED_AFTER + 1), take_turns) as attempt:
            assert attempt.kill_at_gate(KILLED_AFTER + 1), attempt.complaints()
            run = attempt.run_dir
        saved = saved_in(run, KILLED_AFTER, streams)
        waiting = {sample.sample_id for sample in saved.values() if sample.num_given_tokens and not compare(sample)}
        assert waiting, "given tokens that no engine has read"
        with Attempt(config, engine, prepare=take_turns) as attempt:
            attempt.finish()
    finally:
        engine.kill()

    steps = range(1, NUM_STEPS + 1)
    trained = {s.sample_id: s for n in steps for g in read_groups(run / "rollouts", n, streams) for s in g.samples}
    assert all(map(compare, trained.values()))
    assert any(
        sample_id in saved
        and sample.num_sampled_tokens > saved[sample_id].num_sampled_tokens
        and len({*sample.versions.tolist()}) >= 3
        and sample.num_given_tokens
        for sample_id, sample in trained.items()
    )
    last = saved_in(run, NUM_STEPS, streams) | trained
    assert any(compare(last[sample_id]) for sample_id in waiting)
    seen = [*records(tmp_path / "seen")]
    assert {(r["rank"], r["stage"]) for r in seen if r["where"] == "scores"} == {(n, n // 4) for n in range(8)}
    assert {(r["rank"], r["stage"]) for r in seen if r["where"] == "loss"} == {(n, 1) for n in range(4, 8)}
    for where, stage in (("scores", 0), ("scores", 1), ("loss", 1)):
        assert sum(r["given"] for r in seen if (r["where"], r["stage"]) == (where, stage)) > 0, "rows of given tokens"
