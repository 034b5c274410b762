"""Runs of a small mixture that replay routes: killed and resumed bit for bit; overlapped with training."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bapo_megatron.assets import demo_model_path
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.families import token_streams
from bapo_megatron.rollout.book import groups_of
from bapo_megatron.runtime.files import read_jsonl
from tests.integration.gates import Gates
from tests.integration.killable import Attempt, Engine, checkpoint_of, metrics_of, small_run, surviving

NUM_STEPS, KILLED_AFTER = 4, 2
SETTINGS = (
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "rollout.groups_in_flight=4",
    "rollout.tokens_per_round=4",
    "rollout.max_response_tokens=12",
    "model.replay_routes=true",
    f"train.num_steps={NUM_STEPS}",
    "parallel.tensor=1",
    "parallel.data=2",
    "parallel.expert=2",
    "optimizer.lr=0.01",
    "train.entropy_coef=0.5",  # moves the weights, whatever the rewards
)


def save_mixture(folder: Path) -> None:
    """Save a random mixture with the demo's tokenizer, whose routers choose differently from token to token."""
    torch.manual_seed(4)
    config = transformers.Qwen3MoeConfig(
        vocab_size=16,
        hidden_size=48,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.1,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(0, 0.5)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / file, folder)


def note_requests(path: Path) -> None:
    """Let rank 0 note how many requests are open when it has paused for a push, and when the push begins."""
    from bapo_megatron.rollout.manager import RolloutManager
    from bapo_megatron.sync.broadcast import BroadcastChannel

    pause, push, opened = RolloutManager.pause, BroadcastChannel.push, []

    def note(what: str) -> None:
        with path.open("a") as file:
            file.write(f"{what} {len(opened[0])}\n")

    def noted_pause(self: RolloutManager) -> None:
        pause(self)
        opened[:] = [self.scheduler.dispatcher.open_requests]
        note("paused")

    def noted_push(self: BroadcastChannel, *arguments: Any) -> Any:
        note("push")
        return push(self, *arguments)

    RolloutManager.pause, BroadcastChannel.push = noted_pause, noted_push  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_push_during_sampling_finds_no_open_request(tmp_path: Path) -> None:
    mixture = tmp_path / "mixture"
    save_mixture(mixture)
    settings = ("rollout.overlap=true", "rollout.max_staleness=6", f"model.path={mixture}")
    config = small_run(tmp_path, "run", *SETTINGS, *settings)
    engine = Engine(tmp_path / "engine", "--model-path", str(mixture))
    try:
        with Attempt(config, engine, prepare=partial(note_requests, tmp_path / "noted")) as attempt:
            attempt.finish()
    finally:
        engine.kill()
    assert (tmp_path / "noted").read_text() == "paused 0\npush 0\n" * (NUM_STEPS + 1)


@pytest.mark.slow
def test_a_run_with_replay_is_resumed_bit_for_bit(tmp_path: Path) -> None:
    """Killed with partial responses, whose routes are in the checkpoint."""
    mixture = tmp_path / "mixture"
    save_mixture(mixture)
    whole, killed = (small_run(tmp_path, name, f"model.path={mixture}", *SETTINGS) for name in ("whole", "killed"))
    engine = Engine(tmp_path / "engine", "--model-path", str(mixture))
    try:
        with Attempt(whole, engine) as attempt:
            attempt.finish()
            wanted = attempt.run_dir
        with Attempt(killed, engine, Gates(tmp_path / "gates", KILLED_AFTER + 1)) as attempt:
            assert attempt.kill_at_gate(KILLED_AFTER + 1), attempt.complaints()
            got = attempt.run_dir
        with Attempt(killed, engine) as attempt:
            attempt.finish()
    finally:
        engine.kill()
    streams = token_streams("auto", mixture, {"routes"})
    state = CheckpointStore.load(got / "checkpoints" / f"step-{KILLED_AFTER:06d}", {})["rollout"]
    partial = [s for groups in groups_of(state, streams) for g in groups for s in g.samples if s.num_sampled_tokens]
    assert partial
    for sample in partial:
        (trajectory,) = sample.trajectories
        rows = np.concatenate([values for segment in trajectory.segments for values in segment.rows.values()])
        assert len(rows) == trajectory.token_ids.size
        assert (rows[1:] != 255).all()
    assert metrics_of(got) == metrics_of(wanted)
    for step in range(1, NUM_STEPS + 1):
        assert checkpoint_of(got, step) == checkpoint_of(wanted, step), f"step {step}"
        assert surviving(got, "step")[step] == surviving(wanted, "step")[step]
    rows = read_jsonl(wanted / "metrics.jsonl")
    assert max(row["staleness/max"] for row in rows) >= 3, "responses of several weight versions"
    assert max(row["routes/other_share"] for row in rows) > 0, "newer weights choose other experts"
