"""Every shipped combination of model, algorithm and cluster passes `bapo check`, and is on the page of plans."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans_page import ALGORITHMS, RESPONSE_SHARE, algorithms, best_example, cell, combinations, example, table

from bapo_megatron import cli, local
from bapo_megatron.algorithms.chunks import chunk_rows
from bapo_megatron.config.load import load_config, shipped_configs
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import model_shape
from bapo_megatron.machine.gpus import GIB, GPUS
from bapo_megatron.machine.memory import fullest_rank
from bapo_megatron.machine.shared_gpu import wanted_server_bytes
from bapo_megatron.preflight.checks.all import check_settings
from bapo_megatron.preflight.known_models import KNOWN_MODELS
from bapo_megatron.preflight.plan import (
    ROOMY,
    check_machines,
    check_memory,
    check_unused,
    decided,
    make_plan,
    planned,
    step_balance,
    with_choices,
)
from bapo_megatron.preflight.suggest import fitting_splits
from bapo_megatron.resolved import Resolved, resolve

COMBINATIONS = [
    (model, algorithm, cluster) for model, cluster in combinations() for algorithm in algorithms(model, cluster)
]

FP8 = "precision/fp8"
RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"


def test_every_shipped_file_is_part_of_a_combination() -> None:
    shipped = {name for name in shipped_configs() if "/" in name}
    assert shipped == {FP8} | {name for m, a, c in COMBINATIONS for name in (m, *ALGORITHMS[a], c)}


@pytest.mark.parametrize(("model", "cluster"), combinations())
def test_it_passes_the_check_on_its_cluster_without_a_warning(model: str, cluster: str) -> None:
    files_of = [ALGORITHMS[algorithm] for algorithm in algorithms(model, cluster)]
    configs = [load_config([model, *files, cluster]) for files in files_of]
    hf_config = KNOWN_MODELS[Path(configs[0].model.path).name]
    if (shape := model_shape(hf_config)).experts is None and shape.linear is None:
        configs += [load_config([model, *files, FP8, cluster]) for files in files_of]
        configs.append(load_config([model, *files_of[-1], FP8, cluster], ["precision.recipe=blockwise"]))
    for config in configs:
        gpus = config.cluster.nodes * config.cluster.gpus_per_node
        assert check_settings(resolve(config, hf_config), num_gpus=gpus, given=()) == []
        assert [
            *check_machines(resolve(config)),
            *check_memory(resolve(config, hf_config)),
            *check_unused(resolve(config)),
        ] == []
        assert resolve(config).placement.num_gpus == gpus, "no GPU is idle"


@pytest.mark.parametrize("algorithm", sorted(name for name in shipped_configs() if name.startswith("algorithms/")))
def test_every_recipe_fits_sixteen_nodes_with_any_one_algorithm(algorithm: str) -> None:
    """docs/recipes.md names these nodes in its examples; 235B needs their servers to be wide."""
    for model in (name for name in shipped_configs() if name.startswith("recipes/")):
        config = load_config([model, algorithm, f"clusters/16x8-h200{'-wide' if '235b' in model else ''}"])
        hf_config = KNOWN_MODELS[Path(config.model.path).name]
        assert [*check_memory(resolve(config, hf_config)), *check_unused(resolve(config))] == [], model


def test_the_command_says_so_without_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["check", "recipes/qwen3-32b-64k", "algorithms/bapo", "clusters/16x8-h200"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert "64 GPUs for the trainer, 64 for servers, 0 idle" in out


@pytest.mark.parametrize("model", ["recipes/r1-distill-qwen-32b-64k", "recipes/qwen3-32b-64k"])
@pytest.mark.parametrize("cluster", ["clusters/1x8-h100", "clusters/1x8-h200"])
def test_32b_on_one_node_is_refused_with_the_numbers(
    model: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights, gradients and Adam's state do not fit in the four GPUs that are not servers."""
    layout = ["parallel.tensor=4", "parallel.pipeline=1"]
    assert cli.main(["check", model, "algorithms/bapo", cluster, *layout]) == 2
    error = capsys.readouterr().err
    assert "a trainer rank needs" in error
    assert "GiB" in error


@pytest.mark.slow
def test_mixtures_are_split_as_the_best_split_says() -> None:
    """No other layout with these GPUs and servers has a step that is a tenth shorter."""
    for model, cluster in combinations():
        run = planned(cell(model, "BAPO", cluster))
        config = run.config
        if run.shape.experts is None:
            continue
        response = config.rollout.max_response_tokens // RESPONSE_SHARE
        plan = make_plan(run, response)
        own = step_balance(config, plan)
        servers = (config.rollout.num_servers, config.rollout.server_tensor_parallel)
        others = fitting_splits(run, config.parallel.size, response)
        same = [
            s
            for s in others
            if (s.run.config.rollout.num_servers, s.run.config.rollout.server_tensor_parallel) == servers
        ]
        assert own
        assert same
        assert 0.9 * own.step_s <= min(s.balance.step_s for s in same), f"{model} on {cluster}"


def test_as_few_layers_are_recomputed_as_the_memory_asks_for() -> None:
    chosen = set()
    for model, algorithm, cluster in COMBINATIONS:
        run = planned(cell(model, algorithm, cluster))
        config = run.config
        assert config.cluster.gpu
        memory_gib = GPUS[config.cluster.gpu].memory_gib
        limit = ROOMY * memory_gib * GIB - (wanted_server_bytes(run, memory_gib) if config.shares_gpus else 0)
        train = with_choices(run).config.train
        per_rank = max(config.parallel.stage_sizes(run.shape.num_layers))
        count = (train.recompute_layers or per_rank) if train.recompute else 0
        chosen.add(0 < count < per_rank)

        def need(count: int, run: Resolved = run) -> int:
            settings = {"recompute": count > 0, "recompute_layers": count or None}
            train = run.config.train.model_copy(update=settings)
            return make_plan(run.changed(run.config.model_copy(update={"train": train}))).trainer.total

        assert need(count) <= limit or (config.shares_gpus and count == per_rank), "a full server need not fit"
        assert count == 0 or need(count - 1) > limit
    assert chosen == {True, False}


CHUNKED = ("recipes/octothinker-3b-8k", "recipes/r1-distill-qwen-7b-8k", "recipes/r1-distill-qwen-7b-32k")


def chosen_chunk(model: str, algorithm: str, memory_gib: float, recompute: bool | None) -> str:
    """Check the choice by trying each size: the largest that leaves a tenth free, after recomputation is chosen."""
    files = [model, *ALGORITHMS[algorithm], "clusters/1x8-h100"]
    overrides = [f"cluster.gpu_memory_gib={memory_gib}"]
    run = planned(
        load_config(files, overrides if recompute is None else [*overrides, f"train.recompute={recompute}".lower()])
    )
    tensor, gpu_bytes = run.config.parallel.tensor, int(memory_gib * GIB)
    kept = with_choices(run)
    usual = chunk_rows(run.shape.padded_vocab_size(tensor) // tensor, on_gpu=True)

    def chunked(run: Resolved, rows: int) -> Resolved:
        train = run.config.train.model_copy(update={"logprob_chunk_tokens": rows})
        return run.changed(run.config.model_copy(update={"train": train}))

    needs = {n: fullest_rank(chunked(kept, n), gpu_bytes).total for n in (2048, 3072, 4096)}
    rows = max([usual, *(n for n, need in needs.items() if need <= ROOMY * gpu_bytes)])
    assert kept.config.train.logprob_chunk_tokens == (rows if rows > usual else None)
    assert make_plan(run).chunk_rows == rows
    own = with_choices(chunked(run, usual))
    assert own == chunked(kept, usual), "your own choice stays, and no layer is recomputed for larger chunks"
    return "usual" if rows == usual else "most" if rows == 4096 else "between"


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CHUNKED), st.sampled_from([*ALGORITHMS]), st.floats(30, 180), st.sampled_from([None, True]))
def test_chunks_of_logits_take_what_memory_is_left(
    model: str, algorithm: str, memory_gib: float, recompute: bool | None
) -> None:
    chosen_chunk(model, algorithm, memory_gib, recompute)


@pytest.mark.parametrize(
    ("model", "memory_gib", "chosen"),
    [
        (CHUNKED[0], 80.0, "between"),
        (CHUNKED[0], 139.8, "most"),
        (CHUNKED[1], 40.0, "usual"),
        (CHUNKED[2], 139.8, "usual"),
    ],
)
def test_chunks_of_logits_on_gpus_of_every_size(model: str, memory_gib: float, chosen: str) -> None:
    assert chosen_chunk(model, "BAPO", memory_gib, None) == chosen


def test_a_run_keeps_what_its_plan_has_chosen() -> None:
    config = cell("recipes/r1-distill-qwen-7b-8k", "BAPO", "clusters/1x8-h100")
    assert (config.train.recompute, config.train.recompute_layers) == (None, None)
    kept = decided(config)
    assert kept.train.recompute is True
    assert decided(kept) == kept
    larger = {"cluster": config.cluster.model_copy(update={"gpu": "h200"})}
    assert decided(config.model_copy(update=larger)).train.recompute is False
    assert decided(kept.model_copy(update=larger)).train == kept.train, "a resumed run repeats it"
    here = {"cluster": config.cluster.model_copy(update={"gpu": None})}
    assert decided(config.model_copy(update=here)).train.recompute is None, "nothing is known of this machine"
    assert decided(config.model_copy(update=here)).train.logprob_chunk_tokens is None
    parts = load_config([], ["cluster.gpu=h100", "train.recompute_modules=['mlp']"])
    assert decided(parts).train.recompute is None, "your own choice waits for train.recompute=true"


def test_jobs_and_local_runs_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Config] = []

    def keep(config: Config) -> SimpleNamespace:
        kept.append(config)
        return SimpleNamespace(script="")

    monkeypatch.setattr("bapo_megatron.slurm.submit.make_job", keep)
    job = ["recipes/qwen3-32b-64k", "algorithms/bapo", "clusters/16x8-h100", f"run.dir={tmp_path}", "--dry-run"]
    assert cli.main(["slurm", *job]) == 0
    monkeypatch.setattr(local.RunDir, "open", keep)
    with pytest.raises(TypeError):  # what `keep` returns is not a run's folder
        local.train_locally(load_config(["demo"], [f"run.dir={tmp_path}", "cluster.gpu=h100"]))
    assert [(c.train.recompute, c.train.recompute_layers) for c in kept] == [(True, 23), (False, None)]


def test_the_page_has_a_plan_of_every_combination() -> None:
    head, _, *lines = (line.strip("| ").split(" | ") for line in table().splitlines())
    shown = [(f"recipes/{model}", f"clusters/{cluster}") for model, cluster, *_ in lines]
    assert shown == combinations()
    assert all(len(cells) == len(head) and all(cells) for cells in lines)


def test_the_page_has_the_output_of_the_commands() -> None:
    shown = "\n".join(example().splitlines()[:4])
    assert f"\n{shown}\n" in RECIPES.read_text(encoding="utf-8"), "the first lines are on this page too"
    for text, verdict in ((example(), "fits       yes: "), (best_example(), "best       trainer 16 GPUs, servers ")):
        command, *output = text.splitlines()
        assert command.startswith("    $ bapo plan ")
        assert any(line.startswith(f"    {verdict}") for line in output)


def test_a_recipes_run_has_its_name() -> None:
    recipes = [name for name in shipped_configs() if name.startswith("recipes/")]
    assert {load_config([name]).run.name for name in recipes} == {name.removeprefix("recipes/") for name in recipes}


def test_octothinker_searches_in_the_papers_ranges() -> None:
    """The model sets them, overriding the preset that the algorithm names."""
    bapo = cell("recipes/octothinker-3b-8k", "BAPO", "clusters/1x8-h100").bapo
    assert (bapo.preset, bapo.rho0) == ("paper", 0.45)
    assert (bapo.low.start, bapo.low.stop, bapo.high.start, bapo.high.stop) == (0.8, 0.9, 1.2, 2.0)
    paper = cell("recipes/r1-distill-qwen-7b-8k", "BAPO", "clusters/1x8-h100").bapo
    assert (paper.rho0, paper.low.start, paper.high.stop) == (0.4, 0.6, 3.0)
