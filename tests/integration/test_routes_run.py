"""A run of a small mixture that replays routes, overlapped with training. Runs that are killed: partial_kills.py."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.assets import demo_model_path
from bapo_megatron.hf.shape import load_hf_config
from tests.integration.killable import Attempt, Engine, small_run

NUM_STEPS = 4
REPLAY = (
    "model.replay_routes=true",
    "parallel.tensor=1",
    "parallel.data=2",
    "parallel.expert=2",
    "optimizer.lr=0.01",
    "train.entropy_coef=0.5",  # moves the weights, whatever the rewards
)
SETTINGS = (
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "rollout.groups_in_flight=4",
    "rollout.tokens_per_round=4",
    "rollout.max_response_tokens=12",
    f"train.num_steps={NUM_STEPS}",
    *REPLAY,
)


def save_small_mixture(folder: Path, like: Path) -> None:
    """Save a random mixture with another model's vocabulary."""
    from tests.mixture_model import save_mixture  # ranks, which import this module, start faster without it

    save_mixture(folder, 4, 128, vocab_size=load_hf_config(like)["vocab_size"], initializer_range=0.1)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(like / file, folder)


def note_requests(path: Path) -> None:
    """Let rank 0 note how many requests are open when it has paused for a push, and when the push begins."""
    from bapo_megatron.rollout.manager import RolloutManager
    from bapo_megatron.sync.broadcast import BroadcastChannel

    pause, send, opened = RolloutManager.pause, BroadcastChannel.send, []

    def note(what: str) -> None:
        with path.open("a") as file:
            file.write(f"{what} {len(opened[0])}\n")

    def noted_pause(self: RolloutManager) -> None:
        pause(self)
        opened[:] = [self.scheduler.dispatcher.open_requests]
        note("paused")

    def noted_send(self: BroadcastChannel, *arguments: Any) -> Any:
        note("push")
        return send(self, *arguments)

    RolloutManager.pause, BroadcastChannel.send = noted_pause, noted_send  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_push_during_sampling_finds_no_open_request(tmp_path: Path) -> None:
    mixture = tmp_path / "mixture"
    save_small_mixture(mixture, demo_model_path())
    settings = ("rollout.overlap=true", "rollout.max_staleness=6", f"model.path={mixture}")
    config = small_run(tmp_path, "run", *SETTINGS, *settings)
    engine = Engine(tmp_path / "engine", "--model-path", str(mixture))
    try:
        with Attempt(config, engine, prepare=partial(note_requests, tmp_path / "noted")) as attempt:
            attempt.finish()
    finally:
        engine.kill()
    assert (tmp_path / "noted").read_text() == "paused 0\npush 0\n" * (NUM_STEPS + 1)
