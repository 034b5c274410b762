"""`bapo check` loses nothing: it reports each mistake, once, unless another mistake prevents the check."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from bapo_megatron.assets import demo_model_path
from bapo_megatron.cli import main
from bapo_megatron.config.base import Violation, overlap
from bapo_megatron.config.engines import EngineKind
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import Config
from bapo_megatron.hf.shape import load_hf_config
from bapo_megatron.machine.memory import fullest_rank
from bapo_megatron.preflight import check
from bapo_megatron.preflight.checks.idle import IDLE, Idle
from bapo_megatron.preflight.checks.layout import RANKS
from bapo_megatron.preflight.plan import gpu_memory_gib, with_choices
from bapo_megatron.preflight.reads import reads
from bapo_megatron.resolved import resolve

WHOLE = 'slurm.options=["--exclusive","--mem=0"]'
BASE = (
    "demo",
    "model.dtype=bfloat16",
    "reward.kind=chains",
    "rollout.engine=sglang",
    "rollout.num_servers=8",
    "rollout.server_tensor_parallel=2",
    "parallel.tensor=1",
    "parallel.data=16",
    "eval.interval_steps=10",
    'eval.sets=[{name="held"}]',
    "cluster.gpu=h100",
    "cluster.nodes=4",
    WHOLE,
)
"""A run of the demo's model on a cluster, without a mistake."""


@dataclass(frozen=True)
class Mistake:
    """Overrides of BASE, and the settings of the one violation that follows.

    `not_with`: first settings of other mistakes that undo this one, or prevent its check.
    """

    overrides: str
    settings: tuple[str, ...]
    not_with: tuple[str, ...] = ()

    @property
    def own(self) -> set[str]:
        return {text.partition("=")[0] for text in self.overrides.split()}

    def goes_with(self, other: "Mistake") -> bool:
        """Return whether the two are independent: one setting's value cannot hold two mistakes."""
        prevented = self.settings[0] in other.not_with or other.settings[0] in self.not_with
        return self.own.isdisjoint(other.own) and not prevented


def mistake(overrides: str, settings: str, *, not_with: str = "") -> Mistake:
    return Mistake(overrides, tuple(settings.split()), tuple(not_with.split()))


SETS = "eval.sets eval.interval_steps"
NODES = (
    "slurm.rollout_nodes cluster.nodes rollout.num_servers rollout.engine rollout.server_tensor_parallel cluster.gpu "
    "cluster.gpus_per_node"
)
UPDATES = "train.num_steps train.minibatches_per_step train.epochs_per_step train.rollout_only"
# Without a model's config.json, nothing can be compared with it; memory needs a possible layout.
LAYOUT = "train.minibatches_per_step parallel.virtual_pipeline parallel.sequence slurm.rollout_nodes"
BASE_RUN = resolve(load_config(BASE[:1], BASE[1:]), load_hf_config(demo_model_path()))
MEMORY = reads(
    BASE_RUN, lambda run: fullest_rank(with_choices(run), int(gpu_memory_gib(run.config.cluster) or 0)), first=RANKS
)
# fmt: off
MISTAKES = (
    mistake("run.seed=-1", "run.seed"),
    mistake("model.path=/nope", "model.path"),
    mistake("model.dtype=float32", "model.dtype rollout.engine sglang.extra cluster.gpu"),
    mistake("precision.fp8_params=true", "precision.fp8_params precision.fp8"),
    mistake("data.source=jsonl data.path=/nope", "data.path data.source data.sources"),
    mistake("data.options={min_terms=9,max_terms=2}", "data.options data.source data.sources",
            not_with="data.path"),  # whose source lacks such options, so they are not read
    mistake("data.dataset=x", "data.dataset data.source"),
    mistake("data.system_prompt=Hi", "data.chat_template data.system_prompt"),
    mistake("data.template_options={a=1}", "data.chat_template data.template_options"),
    mistake("data.max_prompt_tokens=500", "data.max_prompt_tokens rollout.max_response_tokens model.path",
            not_with="model.path"),
    mistake("reward.kind=reasoning_gym", "reward.kind reward.weights data.source eval.sets.held.source data.sources"),
    mistake("reward.overlong_penalty=1 reward.overlong_buffer_tokens=600",
            "reward.overlong_buffer_tokens rollout.max_response_tokens"),
    mistake("reward.scale=2", "advantage.kind reward.scale reward.running_std reward.clip",
            not_with="critic.path"),  # with a critic, the scale has an effect
    mistake("monitor.mismatch_action=stop rollout.top_k=9 loss.proximal=learner",
            "monitor.mismatch_action monitor.mismatch_alarm rollout.top_p rollout.top_k model.replay_routes "
            "rollout.tokens_per_round rollout.abort_tail rollout.overlap", not_with="loss.importance_cap"),
    mistake("environment.max_turns=9", "environment.max_turns environment.kind"),
    mistake("rollout.tokens_per_round=600", "rollout.tokens_per_round rollout.max_response_tokens"),
    mistake("rollout.abort_tail=true rollout.groups_in_flight=32", "rollout.abort_tail rollout.max_staleness",
            not_with="rollout.max_staleness"),
    mistake("rollout.groups_in_flight=3", "rollout.groups_in_flight rollout.prompts_per_step"),
    mistake("rollout.max_staleness=0", "rollout.max_staleness train.minibatches_per_step train.epochs_per_step"),
    mistake("rollout.hang_timeout_s=10", "rollout.hang_timeout_s sync.timeout_s rollout.engine"),
    mistake("rollout.keep_group=nomod:keep", "rollout.keep_group"),
    mistake('rollout.urls=["http://x:1"]', "rollout.urls rollout.engine"),
    mistake("rollout.recorded_from=x", "rollout.recorded_from rollout.engine"),
    mistake("advantage.kind=gae critic.path=/nope", "critic.path"),
    mistake("advantage.n_step=5", "advantage.n_step advantage.kind"),
    mistake("critic.lr=1e-4", "critic.lr advantage.kind", not_with="critic.path"),  # a critic has a learning rate
    mistake("teacher.coef=2", "teacher.coef teacher.path teacher.path_by_source teacher.urls teacher.urls_by_source "
            "teacher.hint"),
    mistake("loss.kl_coef=0.1 loss.reference_path=/nope", "loss.reference_path"),
    mistake("loss.kl_target=0.1", "loss.kl_coef loss.kl_target", not_with="loss.reference_path"),
    mistake("loss.importance_cap=3", "loss.importance_cap loss.proximal"),
    mistake("bapo.rho0=1.4", "bapo.rho0 bapo.contribution bapo.preset"),
    mistake("bapo.smoothing_updates=3", "bapo.smoothing_updates bapo.scope"),
    mistake("optimizer.lr=100", "optimizer.lr"),
    mistake("optimizer.warmup_updates=1000",
            f"optimizer.warmup_updates optimizer.schedule optimizer.total_updates {UPDATES}"),
    mistake("optimizer.min_lr_ratio=0.1", "optimizer.min_lr_ratio optimizer.schedule"),
    mistake("lora.alpha=8", "lora.alpha lora.rank"),
    mistake("train.minibatches_per_step=7",
            "train.minibatches_per_step rollout.prompts_per_step rollout.samples_per_prompt"),
    mistake("train.recompute_layers=3", "train.recompute_layers train.recompute"),
    mistake("parallel.virtual_pipeline=2", "parallel.virtual_pipeline parallel.pipeline"),
    mistake("parallel.num_ranks=5", " ".join(("parallel.num_ranks", *RANKS))),
    mistake("parallel.sequence=true", "parallel.sequence parallel.tensor"),
    mistake("cluster.gpu_memory_gib=1", " ".join(MEMORY), not_with=f"model.path {LAYOUT}"),
    mistake("slurm.rollout_nodes=4", NODES),
    mistake('slurm.options=["--mem=0"]', "slurm.options cluster.gpu cluster.nodes"),
    mistake("sync.timeout_s=500", " ".join(("sync.timeout_s", "parallel.timeout_s", *RANKS))),
    mistake("sync.channel=disk sync.bucket_mib=8", "sync.bucket_mib sync.channel rollout.placement"),
    mistake("sync.folder=/nope", "sync.folder sync.channel rollout.placement", not_with="sync.bucket_mib"),
    mistake('eval.sets=[{name="held",path="/nope"}]', "eval.sets.held.path eval.sets.held.source"),
    mistake("eval.num_prompts=3", "eval.num_prompts eval.sets"),
    mistake("checkpoint.interval_steps=none checkpoint.keep_last=5", "checkpoint.keep_last checkpoint.interval_steps"),
    mistake("monitor.prometheus_host=0.0.0.0", "monitor.prometheus_host"),
    mistake("monitor.wandb_project=x", "monitor.wandb_project"),
    mistake("megatron.extra.bogus=1", "megatron.extra.bogus"),
    mistake("sglang.extra.port=1", "sglang.extra.port"),
)
# fmt: on
UNREADABLE = {
    "run.name=a/b": "run.name must match",
    "model.dtype=float16": 'model.dtype must be "float32" or "bfloat16"',
    "data.format=csv": "data.format must be",
    "reward.timeout_s=0": "reward.timeout_s must be above 0",
    "rollout.temperature=-1": "rollout.temperature must be above 0",
    "rollout.engine=vllm": 'rollout.engine must be "embedded"',
    "advantage.lamb=0.9": "no such setting: advantage.lamb (override advantage.lamb=0.9); did you mean advantage.lam?",
    "actor.lr=1e-6": "no such setting: actor.lr (override actor.lr=1e-6); did you mean optimizer.lr?",
    "loss.dual_clip=0.5": "loss.dual_clip must be above 1",
    "bapo.low.stop=1.5": "bapo.low.stop must be at most 1",
    "optimizer.lr=fast": "optimizer.lr must be a number",
    "train.num_step=5": "no such setting: train.num_step (override train.num_step=5); did you mean train.num_steps?",
    "train.recompute=yes": "train.recompute must be true or false",
    "parallel.context=0": "parallel.context must be above 0",
    "parallel.pipeline=[1": "override",
    "cluster.gpu=v100": "cluster.gpu must be",
    "cluster.nodes=some": "cluster.nodes must be a whole number",
    "slurm.time_limit=soon": "slurm.time_limit must be a time above 0",
    "sync.bucket_mib=1e9": "sync.bucket_mib must be at most 1e+06",
    "eval.top_p=2": "eval.top_p must be at most 1",
    "checkpoint.keep_last=0.5": "checkpoint.keep_last must be a whole number",
    "monitor.sinks=[1]": "monitor.sinks.0 must be",
}
"""Overrides that cannot be read, and how the one message about each begins."""


@pytest.fixture(autouse=True, scope="module")
def no_gpu() -> Iterable[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "num_visible_gpus", lambda: 0)
        yield


def found_in(overrides: Iterable[str]) -> list[Violation]:
    return check.read_and_check([*BASE, *overrides], elsewhere=True, here=True)[1]


def overrides_of(mistakes: Iterable[Mistake]) -> list[str]:
    return [text for one in mistakes for text in one.overrides.split()]


def independent(drawn: Iterable[Mistake]) -> list[Mistake]:
    """Leave out mistakes that conflict with an earlier one."""
    kept: list[Mistake] = []
    for one in drawn:
        if all(one.goes_with(other) for other in kept):
            kept.append(one)
    return kept


def settings_of(violation: Violation) -> tuple[str, ...]:
    """Return its settings; of the memory plan those that BASE's reads, as other mistakes lead to more or fewer."""
    is_memory = violation.problem.startswith("a trainer rank needs") and violation.settings[: len(RANKS)] == RANKS
    return MEMORY if is_memory else violation.settings


def expect(found: Sequence[Violation], mistakes: Iterable[Mistake], unreadable: Iterable[str] = ()) -> None:
    """Check that each mistake is reported once, and nothing else."""
    beginnings = [UNREADABLE[text] for text in unreadable]
    told = [v for v in found if not any(v.message.startswith(text) for text in beginnings)]
    assert Counter(map(settings_of, told)) == Counter(one.settings for one in mistakes)
    assert len(found) - len(told) == len(beginnings)
    assert len({v.message for v in found}) == len(found)


def test_the_base_has_no_mistake() -> None:
    assert found_in([]) == []


def test_there_are_enough_mistakes_and_few_depend_on_each_other() -> None:
    assert len(MISTAKES) >= 40
    sections = {one.overrides.partition(".")[0] for one in MISTAKES}
    assert sections == set(Config.model_fields)
    pairs = [(a, b) for i, a in enumerate(MISTAKES) for b in MISTAKES[:i] if not a.goes_with(b)]
    assert len(pairs) < 0.02 * len(MISTAKES) ** 2 / 2


@pytest.mark.parametrize("one", MISTAKES, ids=lambda one: one.settings[0])
def test_each_mistake_alone_is_told_once(one: Mistake) -> None:
    expect(found_in(overrides_of([one])), [one])


@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(st.sampled_from(MISTAKES), unique=True, max_size=len(MISTAKES)))
def test_any_subset_is_told_completely(drawn: list[Mistake]) -> None:
    mistakes = independent(drawn)
    expect(found_in(overrides_of(mistakes)), mistakes)


@pytest.mark.parametrize("first", range(0, len(MISTAKES), 6))
def test_as_many_as_go_together_are_told(first: int) -> None:
    mistakes = independent([*MISTAKES[first:], *MISTAKES[:first]])
    assert len(mistakes) >= 34
    expect(found_in(overrides_of(mistakes)), mistakes)


@pytest.mark.parametrize("text", UNREADABLE)
def test_each_unreadable_setting_alone_is_told_once(text: str) -> None:
    expect(found_in([text]), [], [text])


@pytest.mark.parametrize("table", ["model", "parallel", "rollout", "train", "data"])
def test_a_table_that_cannot_be_read_is_all_that_is_told(table: str) -> None:
    """Its defaults do not fit a recipe for 128 GPUs, so there is no memory plan; that is not the user's error."""
    found = check.read_and_check(["recipes/qwen3-32b-64k", "clusters/16x8-h200", f"{table}=[]"], elsewhere=True)[1]
    (message,) = [v.message for v in found if v.severity == "error"]
    assert message.startswith(f"{table} ")


@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.lists(st.sampled_from(MISTAKES), unique=True),
    st.lists(st.sampled_from(sorted(UNREADABLE)), unique=True, max_size=4),
)
def test_unreadable_settings_hide_only_what_depends_on_them(drawn: list[Mistake], unreadable: list[str]) -> None:
    names = {text.partition("=")[0] for text in unreadable}
    mistakes = [one for one in independent(drawn) if one.own.isdisjoint(names)]
    told = [one for one in mistakes if not overlap(one.settings, names)]
    expect(found_in([*overrides_of(mistakes), *unreadable]), told, unreadable)


VARIANTS = (
    "",
    "train.recompute=true train.recompute_layers=1",
    "train.recompute=true train.minibatches_per_step=4 bapo.scope=lagged optimizer.distributed=true",
    "train.recompute=true train.recompute_modules=['mlp'] parallel.tensor=2 parallel.sequence=true",
    "loss.name=own:loss loss.search_bounds=true",
    "loss.name=grpo loss.proximal=learner loss.kl_coef=0.1",
    "advantage.kind=gae",
    "precision.fp8=hybrid precision.fp8_params=true optimizer.distributed=true",
    "parallel.pipeline=2 parallel.virtual_pipeline=2 slurm.rollout_nodes=1",
    "rollout.engine=embedded rollout.tokens_per_round=none",
    "data.source=jsonl eval.interval_steps=none",
    "cluster.gpu=none parallel.data=1",
)


def configured(variant: str) -> Config:
    return load_config(BASE[:1], [*BASE[1:], *variant.replace("'", '"').split()])


class Watched:
    """An engine's kind that notes whether it is read."""

    def __init__(self, kind: EngineKind) -> None:
        self.kind, self.read = kind, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add("rollout.engine")
        return getattr(self.kind, name)


@pytest.mark.parametrize("row", IDLE, ids=lambda row: row.settings.split()[0])
def test_an_idle_setting_depends_on_the_settings_that_its_condition_reads(row: Idle) -> None:
    read: set[str] = set()
    for config in map(configured, VARIANTS):
        run = resolve(config)
        kind = Watched(run.engine)
        read |= {*reads(run, lambda run, kind=kind: row.act(run.config, kind))} | kind.read  # type: ignore[misc]
    assert read == set(row.on.split())


# fmt: off
FOLLOWING = {
    # without a data set, there is no prompt that a judge could fail to score
    "data.source=reasoning_gym reward.kind=code": ["data.dataset", "data.source"],
    "data.source=reasoning_gym data.dataset=leg_counting reward.kind=code data.max_prompt_tokens=400":
        ["data.source"],
    "optimizer=[] optimizer.lr=3": ["optimizer"],
    # too few GPUs in all are too few on each node
    f"cluster.gpu=h100 cluster.nodes=2 parallel.data=64 rollout.num_servers=2 {WHOLE}":
        ["rollout.engine", "parallel.tensor"],
    f"cluster.gpu=h100 cluster.nodes=2 cluster.gpus_per_node=1 parallel.data=1 rollout.num_servers=2 {WHOLE}":
        ["rollout.engine", "parallel.tensor"],
    # an entry of a list hides neither its other settings nor other entries
    'data.sources=[{name="a",source="jsonl",weight=0},{name="b",source="jsonl",path="/nope"}]':
        ["data.sources.0.weight", "data.sources.a.path", "data.sources.b.path"],
    'data.sources=[{name="a",source="jsonl",path=3},{name="b",source="jsonl",path="/nope"}]':
        ["data.sources.0.path", "data.sources.b.path"],
    'data.sources=[{source="jsonl"},{name=4},{name="b",source="jsonl",path="/nope"}]':
        ["data.sources.0.name", "data.sources.1.name"],
    'eval.interval_steps=5 eval.sets=[{name="a",top_p=7},{name="b",source="jsonl",path="/nope"}]':
        ["eval.sets.0.top_p", "eval.sets.b.path"],
}
"""Overrides of the demo, with the first setting of each message."""
# fmt: on


@pytest.mark.parametrize("overrides", FOLLOWING)
def test_what_only_follows_is_not_told(overrides: str) -> None:
    found = check.read_and_check(["demo", *overrides.split()], elsewhere=True, here=True)[1]
    assert sorted(v.settings[0] for v in found) == sorted(FOLLOWING[overrides])


def test_a_list_in_place_of_a_table_is_blamed_on_who_wrote_it() -> None:
    found = found_in(["bapo.high=[1.5,2,1e-5]", "bapo.low=[0.5,1.2,0.1]"])
    assert [(v.settings[0], "override bapo." in v.problem) for v in found] == [
        ("bapo.high.step", True),
        ("bapo.low.stop", True),
    ]


def test_training_is_refused_with_all_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    """These include mistakes that show only when files are read."""
    assert main(["train", "demo", "optimizer.lr=fast", "data.source=jsonl", "data.path=/nope"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in told] == ["optimizer.lr", "data.path:"]


def test_without_its_engine_everything_else_is_still_told() -> None:
    engine = mistake("rollout.engine=nomod:KIND", "rollout.engine")
    mistakes = independent(MISTAKES)
    told = [one for one in mistakes if not overlap(one.settings, engine.settings)]
    assert len(mistakes) > len(told) > 30
    expect(found_in([*overrides_of(mistakes), engine.overrides]), [engine, *told])


def test_names_are_compared_and_not_their_letters() -> None:
    """For example, cluster.gpu in cluster.gpus_per_node, and train.recompute in the advice on memory."""
    found = found_in(["cluster.gpu=v100", "train.recompute_layers=2", "train.recompute=yes"])
    assert [v.settings for v in found] == [("train.recompute",), ("cluster.gpu",)]
    found = found_in(["rollout.engine_threads=0", "rollout.engine=attach"])
    assert ("rollout.urls", "rollout.engine") in [v.settings for v in found]
    found = found_in(["data.sources=3", "data.source=jsonl"])
    assert [v.settings for v in found] == [("data.sources",)]


def test_a_misplaced_run_hides_nothing_else() -> None:
    """`bapo train` got a configuration for several nodes."""
    drawn = [one for one in independent(MISTAKES) if "cluster.gpu_memory_gib" not in one.overrides]
    found = check.read_and_check([*BASE, *overrides_of(drawn)], here=True)[1]
    drawn = [one for one in drawn if not one.settings[0].startswith("slurm.")]  # the job's nodes are not checked
    expect(found, [mistake("", "cluster.nodes"), *drawn])
