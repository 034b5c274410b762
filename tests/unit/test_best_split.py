"""`bapo plan`: its first lines, `--best`, and hints that help."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans_page import NODES, SIZES, WORKLOAD, best_splits

from bapo_megatron.cli import main
from bapo_megatron.config.base import Violation
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import model_shape
from bapo_megatron.preflight.check import accepts_layout
from bapo_megatron.preflight.checks.layout import check_gpu_count
from bapo_megatron.preflight.checks.slurm import check_nodes, check_placement
from bapo_megatron.preflight.explain import time_text
from bapo_megatron.preflight.known_models import planned_config
from bapo_megatron.preflight.plan import make_plan
from bapo_megatron.preflight.suggest import best_split, fitting_splits, suggest, trainer_sizes
from bapo_megatron.resolved import resolve
from tests.resolving import shaped

SMALL = ["recipes/r1-distill-qwen-7b-8k", "algorithms/bapo", "clusters/1x8-h100"]
BIG = ["recipes/qwen3-32b-64k", "algorithms/bapo", "clusters/1x8-h100"]


def of_size(size: str, nodes: int, *overrides: str) -> Config:
    cluster = [f"model.path={SIZES[size]}", f"cluster.nodes={nodes}"]
    return load_config(["algorithms/bapo", "clusters/1x8-h100"], [*cluster, *WORKLOAD, *overrides])


def test_the_best_split_is_a_file_that_check_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "best.toml"
    assert main(["plan", "--best", *SMALL, "-o", str(file)]) == 0, "--best takes no file: it may come first"
    told = capsys.readouterr().out
    assert "present    trainer 4 GPUs, servers 1 x 4 GPUs: train " in told
    assert "trainer idle" in told
    config = load_config([*SMALL, str(file)])
    assert config.parallel.size == config.parallel.num_ranks
    assert main(["check", *SMALL, str(file)]) == 0
    capsys.readouterr()
    before = file.read_bytes()
    assert main(["plan", *SMALL, "--best", "-o", str(file)]) == 2
    assert capsys.readouterr().err == f"bapo: {file} exists: give another name with -o, or remove it\n"
    assert file.read_bytes() == before


def test_what_does_not_fit_a_shared_gpu_needs_more_than_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--best", *SMALL[:2], "clusters/1x8-h100-split"]) == 0
    refused = re.findall(r"a trainer GPU would need (\S+) GiB of (\S+)\n", capsys.readouterr().out)
    assert refused
    assert all(float(need) > float(have) for need, have in refused)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (["demo", "--best"], 'set cluster.gpu and rollout.engine="sglang"'),
        (["demo", "-o", "best.toml"], "-o writes the layout that --best finds"),
        ([*BIG, "--best"], "no layout fits on 8 GPUs; the smallest cluster that does is 3 nodes: set cluster.nodes=3"),
        (
            [*BIG, "--best", "rollout.max_response_tokens=8000000", "cluster.nodes=31"],
            "max_position_embeddings=65536",
        ),
    ],
    ids=["CPUs", "no --best", "too small", "another mistake"],
)
def test_no_split_is_one_error(arguments: list[str], answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert answer in told.err
    assert len(told.err.splitlines()) == 1


def test_the_smallest_cluster_is_one_on_which_a_layout_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--best", *BIG, "cluster.nodes=3"]) == 0
    assert "present" not in capsys.readouterr().out, "16 ranks and a server do not fit on their layout's nodes"
    assert main(["plan", "--best", *BIG, "cluster.nodes=2"]) == 2


@pytest.mark.slow
def test_94_layers_are_split_over_stages_of_24_24_24_and_22(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, model = tmp_path / "best.toml", "recipes/qwen3-235b-a22b-32k"
    files = [model, "algorithms/bapo", "clusters/16x8-h200-wide"]
    assert main(["plan", "--best", *files, "--response-tokens", "8192", "-o", str(file)]) == 0
    told = capsys.readouterr().out
    parallel = load_config([*files, str(file)]).parallel
    assert (parallel.pipeline, parallel.last_stage_layers) == (4, 22)
    assert re.search(r"parallel.pipeline=4 +2: ", told), "half as many stages have a last one of another size"
    assert main(["check", *files, str(file)]) == 0


def test_the_best_split_overrides_a_last_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, file = tmp_path / "mine.toml", tmp_path / "best.toml"
    mine.write_text("[parallel]\npipeline = 2\nlast_stage_layers = 9\n")
    assert main(["plan", "--best", *SMALL, str(mine), "-o", str(file)]) == 0
    assert main(["check", *SMALL, str(mine), str(file)]) == 0
    parallel = load_config([*SMALL, str(mine), str(file)]).parallel
    assert parallel.last_stage_layers == 28 // parallel.pipeline


@pytest.mark.parametrize(
    "layout", ["parallel.tensor=3 parallel.pipeline=5", "rollout.num_servers=7", "parallel.data=9"]
)
def test_the_present_layout_does_not_matter(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for given_layout in ((), layout.split()):
        assert main(["plan", "--best", *SMALL, *given_layout]) == 0
        answers.append(capsys.readouterr().out.partition("best ")[2])
    assert answers[0] == answers[1]


@given(size=st.sampled_from(["1.5B", "7B"]), nodes=st.integers(1, 2), response=st.integers(100, 8192))
@settings(max_examples=5)
def test_the_best_split_is_round_unless_another_is_a_tenth_faster(size: str, nodes: int, response: int) -> None:
    config = of_size(size, nodes)
    hf_config = planned_config(config.model.path)
    best = best_split(resolve(config, hf_config), response)
    assert best is not None
    assert accepts_layout(resolve(best.run.config, hf_config), on_gpus=True)
    every = [
        s for n in trainer_sizes(config) for s in fitting_splits(shaped(config, model_shape(hf_config)), n, response)
    ]
    fastest_s = min(s.balance.step_s for s in every)
    assert best.balance.step_s <= fastest_s / 0.9
    ranks = best.run.config.parallel.size
    if ranks & (ranks - 1):
        rounds = [s for s in every if s.run.config.parallel.size in (1, 2, 4, 8)]
        assert all(s.balance.step_s > fastest_s / 0.9 or s.plan.trainer.total > 0.9 * 79.1 * 2**30 for s in rounds)


@pytest.mark.slow
def test_the_page_has_the_best_split_of_every_size() -> None:
    _, _, *lines = best_splits().splitlines()
    assert [line.strip("| ").split(" | ")[:2] for line in lines] == [[s, str(n)] for s in SIZES for n in NODES]
    for size, nodes in (("32B", 2), ("70B", 2)):
        assert any(line.startswith(f"| {size} | {nodes} | none fits: ") for line in lines)


def test_what_is_suggested_is_a_tenth_faster() -> None:
    """A tiny model has layouts whose times differ by less than a second."""
    for config in (load_config(SMALL), load_config(["demo", "algorithms/bapo", "clusters/1x8-h100"], WORKLOAD[:1])):
        hf_config = planned_config(config.model.path)
        present = make_plan(shaped(config, model_shape(hf_config)))
        for suggestion in suggest(resolve(config, hf_config), present):
            assert suggestion.plan.train.expected < 0.9 * present.train.expected
            assert time_text(suggestion.plan.train.expected) != time_text(present.train.expected)


def first_lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    main(["plan", *arguments])
    return capsys.readouterr().out.splitlines()[:3]


def test_the_first_three_lines_say_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    fits, time, change = first_lines([*SMALL, "train.recompute=true"], capsys)
    assert fits.startswith("fits       yes: a trainer GPU needs 58.4 of 75.1 GiB; a server holds ")
    assert time.startswith("time       ")
    assert "a step expected (synchronous): training " in time
    setting = change.split()[1]
    fits, _, again = first_lines([*SMALL, *change.removeprefix("change").partition(": ")[0].split()], capsys)
    assert "yes" in fits
    assert setting not in again, "the suggested change is made"
    ranks = ["parallel.tensor=4", "parallel.pipeline=1"]
    fits, time, change = first_lines([*BIG, *ranks], capsys)
    assert fits.startswith("fits       no: a trainer GPU needs 172.2 of 75.1 GiB")
    assert time == "time       no step is possible"
    assert change == (
        "change     no layout fits on 8 GPUs; the smallest cluster that does is 3 nodes: set cluster.nodes=3"
    )
    fits, time, change = first_lines(["demo"], capsys)
    assert fits.startswith("fits       yes: 2 trainer processes, each of ")
    assert time == "time       not estimated on CPUs"


def test_a_model_whose_steps_take_less_than_a_second_is_too_small_to_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "clusters/1x8-h100", "model.dtype=bfloat16"]
    fits, time, change = first_lines(arguments, capsys)
    assert (fits[:14], time[:28]) == ("fits       yes", "time       too small to plan")
    assert change == "change     nothing in the trainer's layout"
    assert main(["plan", *arguments]) == 0
    assert "of 79.1; a run may fill 95%, 75.1\n" in capsys.readouterr().out
    assert main(["plan", "--best", *arguments]) == 0
    text = capsys.readouterr().out
    assert "too small to plan" in text
    assert "longer" not in text.replace("take longer", "")


def test_a_config_json_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(planned_config(SIZES["7B"])))
    arguments = [*SMALL, f"model.path={tmp_path}"]
    assert main(["plan", *arguments]) == 0
    assert main(["plan", "--best", *arguments]) == 0
    assert capsys.readouterr().err == ""
    assert main(["check", *arguments]) == 2
    assert f"{tmp_path} has no *.safetensors" in capsys.readouterr().err, "a run needs the weights"


@pytest.mark.parametrize("verb", ["plan", "check"])
def test_an_unknown_gpu_hides_what_depends_on_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, *SMALL, "cluster.gpu=h100x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('bapo: cluster.gpu must be "a100"')


def test_an_error_names_the_file_that_a_setting_is_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[parallel]\ntensor = 2\npipeline = 7\n")
    assert main(["plan", *SMALL, str(mine)]) == 2
    advice = "set parallel.num_ranks=14, or leave it out (parallel.num_ranks is from clusters/1x8-h100)"
    assert advice in capsys.readouterr().err
    assert main(["plan", *SMALL, str(mine), "parallel.num_ranks=5"]) == 2
    assert "parallel.num_ranks is from" not in capsys.readouterr().err, "the reader has just typed it"


@given(
    nodes=st.integers(1, 9),
    alone=st.sampled_from([None, None, 0, 1, 2]),
    ranks=st.sampled_from([2, 4, 6, 8, 16, 24, 32]),
    servers=st.integers(1, 8),
    size=st.sampled_from([1, 2, 4, 8]),
    gpus=st.sampled_from([1, 2, 4, 8]),
    placement=st.sampled_from(["separate", "split"]),
)
@settings(max_examples=120)
def test_a_placement_that_cannot_be_is_one_error_whose_remedies_work(
    nodes: int, alone: int | None, ranks: int, servers: int, size: int, gpus: int, placement: str
) -> None:
    layout = [f"parallel.data={ranks // 2}", "parallel.tensor=2", "parallel.num_ranks=none"]
    layout += [f"rollout.num_servers={servers}", f"rollout.server_tensor_parallel={size}"]
    layout += [f"cluster.nodes={nodes}", f"cluster.gpus_per_node={gpus}"]
    layout.append(f"rollout.placement={placement}")
    if alone is not None:
        layout.append(f"slurm.rollout_nodes={alone}")
    found = placement_errors(layout)
    assert len(found) <= 1, [one.message for one in found]
    for one in found:
        assert re.search(r"parallel\.", one.message), one.message
        assert re.search(r"cluster\.|rollout\.", one.message), one.message
        for remedy in re.findall(r"\w+\.\w+=\d+", one.remedy):
            assert placement_errors([*layout, remedy]) == [], (one.message, remedy)


def placement_errors(layout: list[str]) -> list[Violation]:
    run = resolve(load_config(SMALL, layout))
    cluster = run.config.cluster
    found = [*check_gpu_count(run, cluster.nodes * cluster.gpus_per_node)]
    found = found or [*(check_placement(run) if cluster.nodes > 1 else check_nodes(run))]  # as `bapo check` does
    return [one for one in found if one.severity == "error"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0002, "less than 1 ms"),
        (0.0123, "12 ms"),
        (0.95, "950 ms"),
        (1.26, "1.3 s"),
        (11.4, "11 s"),
        (150, "2.5 min"),
    ],
)
def test_a_small_time_is_not_0(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


def test_servers_of_one_gpu_need_not_fit_next_to_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    """Wider ones may: they take less of each GPU."""
    files = ["recipes/r1-distill-qwen-32b-8k", "algorithms/bapo", "algorithms/lora", "clusters/1x8-h100-split"]
    assert main(["plan", "--best", *files]) == 0
    (size,) = re.findall(r"^best .* servers \d+ x (\d+) GPUs", capsys.readouterr().out, re.MULTILINE)
    assert int(size) > 1
