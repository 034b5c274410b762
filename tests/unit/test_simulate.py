"""Simulated runs against times by hand, and what `bapo plan --simulate` says and refuses."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bapo_megatron.cli import main
from bapo_megatron.config.schema import RolloutConfig
from bapo_megatron.rollout.recorded import write_groups
from bapo_megatron.simulate.found import mean_of
from bapo_megatron.simulate.run import simulate
from bapo_megatron.simulate.world import Curve, LogNormal, Recorded, World
from bapo_megatron.types import Ended, Group, Prompt, Sample, Segment

STEP_S = 0.01  # a decode step takes this long, whatever its batch
LENGTHS = {"0": 40, "1": 100, "2": 60, "3": 80}  # by place in the group
ALONE = ["parallel.num_ranks=4", "parallel.tensor=1", "parallel.data=4", "parallel.sequence=false"]
PLAN = ["plan", "recipes/r1-distill-qwen-7b-8k", "algorithms/bapo", "clusters/1x8-h100"]


def place_length(sample_id: str) -> int:
    return LENGTHS[sample_id.split(".")[1]]


def tail_length(sample_id: str) -> int:
    return 10 if sample_id[0] in "01" else 100


def world(mode: dict[str, Any] | None = None, **changes: Any) -> World:
    rollout = RolloutConfig(prompts_per_step=2, samples_per_prompt=4, max_response_tokens=100, **(mode or {}))
    usual = World(
        rollout,
        num_servers=2,
        step_s=lambda num, context: STEP_S,
        lengths=place_length,
        train_s=lambda num_tokens: 3.0,
        push_s=0.5,
    )
    return replace(usual, **changes)


OVERLAP = {"overlap": True, "max_staleness": 3}
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "partial": {"tokens_per_round": 50},
    "abort_tail": {"abort_tail": True, "groups_in_flight": 4},
    "overlap": OVERLAP,
}


def test_a_synchronous_step_takes_its_longest_response_then_training_and_the_push() -> None:
    found = simulate(world(), 3, 1)
    assert found.steps_s == pytest.approx([100 * STEP_S + 3.0 + 0.5] * 3)
    assert found.trainer_idle == pytest.approx(1 - 3.0 / 4.5)
    assert found.servers_idle == pytest.approx(1 - 1.0 / 4.5)
    assert found.trained_tokens == found.generated_tokens == 3 * 2 * 280
    assert found.ages == {0: 1.0}


def test_the_speed_follows_the_batch_and_the_contexts() -> None:
    """With STEP_S for each running response, a server does one response's tokens after the other."""
    one = world(step_s=lambda num, context: num * STEP_S, num_servers=1)
    assert simulate(one, 1, 0).steps_s == pytest.approx([560 * STEP_S + 3.5])
    alone = world(
        step_s=lambda num, context: context * 1e-3,
        lengths=lambda sample_id: 100,
        num_servers=1,
        prompt_tokens=50,
    )
    decoding_s = sum(1e-3 * (50 + i + 0.5) for i in range(100))  # contexts grow from 50 to 150 tokens
    assert simulate(alone, 1, 0).steps_s == pytest.approx([decoding_s + 3.5], rel=0.07)


def test_a_server_that_pads_is_as_slow_as_its_longest_response() -> None:
    usual = world(OVERLAP, step_s=lambda num, context: 1e-3 * context, train_s=lambda num_tokens: 0.1)
    mean, padded = (simulate(replace(usual, pads=pads), 10, 5) for pads in (False, True))
    assert padded.seconds > 1.1 * mean.seconds


def test_prefills_requests_and_pieces_cost_time() -> None:
    prefilled = world(prefill_s=0.002, prompt_tokens=10)
    found = simulate(prefilled, 1, 0)
    assert found.steps_s == pytest.approx([1.0 + 0.02 + 3.5])  # each server has one prompt, once
    assert found.servers_prefilling == pytest.approx(0.02 / 4.52)
    asked = world(call_s=0.2, request_s=0.01)
    assert simulate(asked, 1, 0).steps_s == pytest.approx([1.0 + 0.2 + 0.04 + 3.5])
    pieces = world({"tokens_per_round": 50}, call_s=0.2)  # the second call finds its prefixes cached
    assert simulate(pieces, 1, 0).steps_s == pytest.approx([1.0 + 2 * 0.2 + 3.5])
    tail = world({"abort_tail": True, "groups_in_flight": 4}, lengths=tail_length)
    (plain_s,) = simulate(tail, 1, 0).steps_s
    assert plain_s == pytest.approx(0.1 + 3.5)
    assert simulate(replace(tail, abort_s=0.01), 1, 0).steps_s == pytest.approx([plain_s + 0.08])  # for 8 of a server


def test_a_full_cache_and_few_slots_let_responses_wait() -> None:
    """Groups of one length: with room for two responses of four, a server takes twice as long."""
    flat = world(lengths=lambda sample_id: 50)
    assert simulate(flat, 1, 0).steps_s == pytest.approx([0.5 + 3.5])
    assert simulate(replace(flat, max_running=2), 1, 0).steps_s == pytest.approx([1.0 + 3.5])
    assert simulate(replace(flat, max_running=1), 1, 0).steps_s == pytest.approx([2.0 + 3.5])
    mixed = world(num_servers=1, max_running=4)  # four more come after 40, 60 and 80 tokens, the last two together
    assert simulate(mixed, 1, 0).steps_s == pytest.approx([1.6 + 3.5])
    assert simulate(replace(mixed, pass_s=0.1), 1, 0).steps_s == pytest.approx([1.6 + 3 * 0.1 + 3.5])
    full = simulate(replace(flat, cache_tokens=104.0), 1, 0)
    # All four grow to 25 tokens, three to 34, two to the end at 50; the last one has half of its tokens then.
    assert full.steps_s == pytest.approx([0.75 + 3.5], rel=0.01)
    assert full.trained_tokens == 8 * 50


def test_an_environment_and_a_judge_take_their_time() -> None:
    judged = world(wait_s=lambda name: 0.25)
    assert simulate(judged, 1, 0).steps_s == pytest.approx([1.0 + 0.25 + 3.5])
    turns = world(wait_s=lambda name: 0.25, num_turns=4, answer_tokens=7, lengths=lambda sample_id: 80)
    found = simulate(turns, 2, 0)
    assert found.steps_s == pytest.approx([0.8 + 4 * 0.25 + 3.5] * 2)
    assert found.trained_tokens == 2 * 8 * 80, "answers are not trained"
    streamed = simulate(replace(turns, rollout=turns.rollout.model_copy(update=OVERLAP)), 4, 4)
    assert streamed.trained_tokens == 4 * 8 * 80
    assert streamed.steps_s == pytest.approx([3.5] * 4), "environments are hidden behind training"


def test_rank_0_reads_one_reply_after_the_other() -> None:
    """8 responses of 100 tokens in two calls: 1 ms a token and 5 ms a reply, on one core."""
    flat = world(lengths=lambda sample_id: 100, token_us={"check": 400.0, "decode": 600.0}, reply_us={"book": 5000.0})
    found = simulate(flat, 2, 0)
    assert found.steps_s == pytest.approx([1.0 + 8 * 0.105 + 3.5] * 2)
    step_s = found.steps_s[0]
    expected = {"check": 0.32 / step_s, "decode": 0.48 / step_s, "book": 0.04 / step_s}
    assert found.rank_zero == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_whole_responses_within_its_bound(mode: str) -> None:
    lengths = LogNormal.with_mean(40.0, 1.0, 100, seed=1)
    found = simulate(world(MODES[mode], lengths=lengths, updates_per_step=2 if mode == "overlap" else 1), 9, 3)
    assert found.num_responses == 9 * 8
    assert found.trained_tokens <= found.generated_tokens + 16 * 100
    assert sum(found.ages.values()) == pytest.approx(1)
    assert max(found.ages) <= {"synchronous": 0, "overlap": 3}.get(mode, 30)
    assert simulate(world(MODES[mode], lengths=lengths), 9, 1) == simulate(world(MODES[mode], lengths=lengths), 9, 1)


def test_on_shared_cards_servers_wait_while_the_trainer_trains() -> None:
    lengths = LogNormal.with_mean(40.0, 1.0, 100, seed=1)
    apart, shared = (simulate(world(OVERLAP, lengths=lengths, shares_gpus=s), 20, 5) for s in (False, True))
    assert apart.steps_s == pytest.approx([3.5] * 20)
    assert shared.seconds > 1.05 * apart.seconds
    assert shared.servers_idle >= 3.5 * 20 / shared.seconds - 1e-6
    moved = simulate(world(shares_gpus=True, moves_s=2.0), 2, 0)
    assert moved.steps_s == pytest.approx([4.5 + 2.0] * 2)


def test_a_server_that_ends_comes_back_with_the_next_push_and_no_token_is_lost() -> None:
    rollout = {"max_retries": 0}
    found = simulate(world(rollout, down=[(0, 0.5, 1.5)]), 3, 0)  # in the first step's sampling
    assert found.num_fenced == 1
    assert found.steps_s[0] == pytest.approx(1.0 + 1.0 + 3.5), "the next round gives its work to the other one"
    assert found.steps_s[1:] == pytest.approx([4.5] * 2)
    assert found.trained_tokens == 3 * 2 * 280
    late = simulate(world(down=[(1, 0.0, 5.0)]), 3, 0)
    assert late.steps_s == pytest.approx([4.5] * 3), "one server holds all responses of this step as fast"
    both = simulate(world(rollout, down=[(0, 0.5, 4.0), (1, 0.5, 2.0)]), 3, 0)
    assert both.trained_tokens == 3 * 2 * 280
    assert both.num_fenced == 2
    for mode in MODES.values():
        lengths = LogNormal.with_mean(40.0, 1.0, 100, seed=1)
        down = [(0, 7.3, 6.0), (1, 22.1, 1.0), (0, 31.7, 20.0)]
        torn = simulate(world(mode, lengths=lengths, down=down), 15, 0)
        assert torn.num_responses == 15 * 8


def test_an_instant_decode_step_ends() -> None:
    found = simulate(world(step_s=lambda num, context: 1e-12), 2, 0)
    assert found.steps_s == pytest.approx([3.5, 3.5], abs=0.01)


def test_groups_that_are_not_kept_are_sampled_again() -> None:
    found = simulate(world(kept_share=0.5), 40, 0)
    num_sampled = found.generated_tokens / 280
    assert num_sampled == pytest.approx(2 * found.trained_tokens / 280, rel=0.3)
    assert found.num_dropped["keep_group"] > 0
    both = [simulate(world(kept_share=0.5), steps, 20 - steps).num_dropped["keep_group"] for steps in (20, 1)]
    assert both[1] < both[0] / 4, "the steps that are not counted do not count here either"


def test_lengths_have_the_mean_that_was_asked_for() -> None:
    drawn = LogNormal.with_mean(900.0, 0.9, 4096, seed=3)
    lengths = [drawn(f"{i}.0") for i in range(4000)]
    assert statistics.fmean(lengths) == pytest.approx(900, rel=0.04)
    assert max(lengths) == 4096
    assert LogNormal.with_mean(4096.0, 0.9, 4096, seed=3)("5.1") == 4096
    groups = ((10, 20), (30, 40), (50, 60))
    found = {tuple(Recorded(groups)(f"{i}.{place}") for place in (0, 1)) for i in range(50)}
    assert found == set(groups)


def test_measured_speeds_are_interpolated() -> None:
    curve = Curve([(1, 1.0), (4, 4.0), (8, 6.0)])
    assert [curve(n, 0.0) for n in (1, 2, 4, 6, 8, 16)] == [1, 2, 4, 5, 6, 12]


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_age_follows_megatron_rl_s_law(lag: int) -> None:
    """Samples are replaced one by one and trained by group: mean age of the first token = tau(group) x (1 + lag).

    tau = E[longest of a group] / E[length]; NVIDIA/Megatron-LM, megatron/rl/README.md, submission R, consumption G.
    """
    lengths = LogNormal.with_mean(30.0, 0.7, 100, seed=2)
    rollout = RolloutConfig(
        prompts_per_step=8,
        samples_per_prompt=4,
        max_response_tokens=100,
        groups_in_flight=8 * (1 + lag),
        max_concurrent_requests=8 * 4 * (1 + lag),
        overlap=True,
        max_staleness=100,
    )
    endless = World(rollout, 1, lambda num, context: STEP_S, lengths, lambda num: 1e-6, 0.0)
    found = simulate(endless, 60, 20)
    drawn = [[lengths(f"{i}.{k}") for k in range(4)] for i in range(2000)]
    tau = statistics.fmean(map(max, drawn)) / statistics.fmean(map(statistics.fmean, drawn))
    assert found.servers_idle < 0.02, "utilisation is 1 / tau(1 sample)"
    assert mean_of(found.first_ages) == pytest.approx(tau * (1 + lag), rel=0.25)


@pytest.mark.slow
def test_the_idle_time_of_rounds_follows_megatron_rl_s_law() -> None:
    """Whole batches: utilisation = 1 / tau(batch), if every response runs at the same speed whatever the batch."""
    lengths = LogNormal.with_mean(30.0, 0.7, 100, seed=2)
    rollout = RolloutConfig(prompts_per_step=8, samples_per_prompt=4, max_response_tokens=100)
    rounds = World(rollout, 1, lambda num, context: STEP_S, lengths, lambda num: 1e-6, 0.0)
    found = simulate(rounds, 40, 0)
    batches = [[lengths(f"{8 * step + i}.{k}") for i in range(8) for k in range(4)] for step in range(40)]
    assert found.seconds == pytest.approx(sum(STEP_S * max(batch) for batch in batches), rel=1e-4)


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*PLAN, "--json", "--response-tokens", "2000", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_prints_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--simulate", "steps=2", "warmup_steps=1", "usd_per_gpu_hour=2")
    found = simulated(capsys, *few)
    assert found == simulated(capsys, *few), "the seed decides everything"
    assert found["gpus"] == 8
    assert found["usd_per_step"] == pytest.approx(8 * 2 * found["step_s"]["mean"] / 3600)
    assert found["response_tokens"] == pytest.approx(2000, rel=0.1)
    assert main([*PLAN, "--response-tokens", "2000", *few]) == 0
    text = capsys.readouterr().out
    assert "simulated  2 steps after 1, 8 GPUs" in text
    assert "USD a step, at 2 an hour and GPU" in text
    assert "greatest length" not in text
    assert main([*PLAN, "--simulate", "steps=1", "warmup_steps=0"]) == 0
    assert "all responses have the greatest length, 8,192 tokens" in capsys.readouterr().out
    slower = simulated(capsys, *few, "decode_ms=[[1, 100.0], [64, 100.0]]", "down=[[0, 0, 40]]")
    assert slower["step_s"]["mean"] > 2 * found["step_s"]["mean"]
    assert slower["fenced"] == 1


def test_recorded_lengths_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rollouts"
    lengths = ((1000, 3000), (2000, 2400))
    for step, pair in enumerate(lengths, 1):
        prompt = Prompt(step, (1, 2), "", "", "test")
        samples = [
            Sample.of(
                f"{step}.{i}",
                prompt,
                [Segment.sampled(0, 0, (5,) * length, (-0.5,) * length)],
                Ended("stop", reward=1.0),
            )
            for i, length in enumerate(pair)
        ]
        write_groups(folder, step + 20, [Group(prompt, tuple(samples))])  # as a branch from step 20 records
    few = ["--simulate", "steps=2", "warmup_steps=0", f"lengths_from={folder}"]
    found = simulated(capsys, *few)
    assert found["response_tokens"] == pytest.approx(2100, rel=0.15)
    assert main([*PLAN, "--json", *few]) == 0
    assert json.loads(capsys.readouterr().out) == found, "the plan has the recorded mean, whatever --response-tokens is"
    assert main([*PLAN, "rollout.max_response_tokens=2500", *few]) == 2
    assert "more than rollout.max_response_tokens=2500" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--simulate", "stepz=3"], "stepz=3: not KEY=VALUE with a setting of the simulation; did you mean steps?"),
        (["--simulate", "steps=0"], "--simulate steps must be above 0, got 0"),
        (["--simulate", "spread=wide"], "--simulate spread must be a number"),
        (["--simulate", "down=[[9, 0, 5]]"], "--simulate down names server 9, and the run has"),
        (
            ["clusters/4x8-h100", "--simulate", "slices=2", "down=[[3, 0, 5]]"],
            "--simulate down names server 3, and a slice has",
        ),
        (["--simulate", "slices=7"], "--simulate slices=7 does not divide"),
        (["--simulate", "lengths_from=/nowhere"], "/nowhere holds no step-*.jsonl.gz; give the `rollouts` folder"),
        (["--simulate", "lengths_from="], "--simulate lengths_from must be a path"),
        (["--simulate", "down=[[0, 9, 5], [0, 12, 5]]"], "server 0 cannot end at 12 s, because it is down until 14 s"),
        (["--simulate", "kept_share=1e-9", "train_s=1"], "--simulate kept_share=1e-09 leaves no groups to train"),
        (["--response-tokens", "20", "--simulate", "turns=21"], "turns=21 needs a token in each turn"),
        (["--simulate", "turns=9", "answer_tokens=90000"], "more than the model's max_position_embeddings=131072"),
        (["--response-tokens", "8193"], "no average can be above rollout.max_response_tokens=8192"),
        (["--json"], "--json prints what --simulate finds"),
        (["--best", "--simulate"], "--best chooses a layout and --simulate runs one"),
        (
            ["rollout.engine=embedded", "rollout.server_tensor_parallel=1", "--simulate"],
            "--simulate needs servers on the GPUs",
        ),
        ([*ALONE, "--simulate"], "a trainer rank needs"),
        (["rollout.num_servers=40", "--simulate"], "GPUs"),
        (["rollout.max_response_tokens=100000000", "--simulate"], "max_response_tokens"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_layouts_that_do_not_fit_get_the_messages_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    huge = ["rollout.max_response_tokens=100000000"]
    for wrong in (["rollout.num_servers=40"], huge, ["optimizer.lr=0"], ALONE, ["rollout.num_servers=2"]):
        codes = [main([*PLAN, *wrong, *more]) for more in ([], ["--simulate", "steps=1"])]
        if codes[0]:
            lines = capsys.readouterr().err.splitlines()
            assert lines[: len(lines) // 2] == lines[len(lines) // 2 :]
        assert codes[0] == codes[1]
