"""Every setting, with its type, default and meaning. One TOML table per section.

This file checks single fields, and contradictions within a section (`ContradictionError`). preflight/checks finds out
whether sections fit each other, the model and the machine.
"""

import math
import re
import string
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from bapo_megatron.config.advantages import ADVANTAGE, ESTIMATORS, FROM_TEACHER, WITH_CRITIC
from bapo_megatron.config.base import (
    LARGEST,
    ContradictionError,
    Count,
    NonNegative,
    PathText,
    Positive,
    Processes,
    Section,
    Violation,
    Whole,
)
from bapo_megatron.config.dotted import ANNOTATOR, ENVIRONMENT, KEEP_GROUP, REWARD
from bapo_megatron.config.engines import ENGINE
from bapo_megatron.config.families import FAMILY
from bapo_megatron.config.losses import DEFAULT, LOSSES, AnyLoss
from bapo_megatron.config.schema_loss import ClipBoundConfig, Divergence, RuleReads
from bapo_megatron.config.sources import OWN_ROWS, SOURCE, SourceKind, source_kind
from bapo_megatron.config.system_calls import known_calls
from bapo_megatron.errors import closest, did_you_mean
from bapo_megatron.hf.adapters import TARGETS, Adapters, Target
from bapo_megatron.hf.streams import ROUTES


class RunConfig(Section):
    """Name, folder and seed of the run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)
    """Name of the run directory; running the same name again resumes it."""
    dir: PathText = "runs"
    """Folder that holds all run directories."""
    seed: int = Field(0, ge=0, lt=2**53)
    """Seeds prompt order, sampling and mini-batch order. On a CPU, with embedded engines and neither overlap nor
    abort_tail, the same seed, layout and threads give the same run bit for bit, interrupted or not; for other cases see
    docs/resume.md."""
    deterministic: bool = False
    """On GPUs, add in the same order in every run, in cuBLAS and torch, whose attention is taken, which takes time:
    docs/resume.md. On CPUs the order is always the same."""
    max_restarts: Whole = 0
    """Restarts of the trainer ranks, from the newest checkpoint, after one has died or hangs (parallel.timeout_s);
    engines keep running. The delays grow, and the count starts again once an attempt has saved three steps. No restart
    follows two attempts in a row that complete no step, or an error that a user has to fix."""
    standby: bool = False
    """bapo train, with max_restarts: for the next restart, keep one spare process per trainer rank that has already
    imported everything. Each takes 0.4 GB of memory and no GPU."""


class ModelConfig(Section):
    """The policy: a Hugging Face checkpoint (docs/models.md)."""

    path: PathText = "demo"
    """Folder with config.json, safetensors and tokenizer; or a name on the Hugging Face hub, such as "Qwen/Qwen3-0.6B",
    which is downloaded, and pinned as "Qwen/Qwen3-0.6B@COMMIT" in the run's config.toml; "demo" is the small model that
    ships with the package."""
    family: Annotated[str, AfterValidator(FAMILY.known)] = "auto"
    """How the model differs from plain Llama. auto: look up config.json's model_type among the package's families; or
    the path of your own Family, "my_module:FAMILY", for checkpoints with that family's model_type."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations. Training in bfloat16 needs a GPU."""
    implementation: Literal["auto", "local", "transformer_engine"] = "auto"
    """Implementation of the trainer's layers. transformer_engine: NVIDIA's kernels, for bfloat16 on GPUs, and the only
    ones with FP8; local: Megatron's own linears and our packed attention; auto: transformer_engine if it is installed
    and can be used, otherwise local."""
    replay_routes: bool = False
    """Mixtures of experts: in every pass of the policy, take the experts that the engine chose when it sampled
    (docs/moe.md). The router still learns: its scores of these experts are its own."""

    @property
    def requested_streams(self) -> tuple[str, ...]:
        """The streams on request that the run learns with."""
        return (ROUTES,) if self.replay_routes else ()


class PrecisionConfig(Section):
    """FP8 inside the layers, through Transformer Engine: see docs/precision.md. The embedding, the output layer,
    log-probs and the loss are never FP8."""

    fp8: Literal["off", "hybrid", "e4m3"] = "off"
    """Format of the operands of the layers' matrix products. hybrid: e4m3 forward, e5m2 for gradients; e4m3: e4m3 for
    both. Needs model.dtype = "bfloat16"."""
    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "tensorwise"
    """Source of the scales. tensorwise: each tensor's own largest value; delayed: its largest values in the last 1024
    passes; blockwise: one scale per 128 values; mxfp8: one per 32 values, on Blackwell."""
    fp8_params: bool = False
    """Keep the layers' matrices in FP8 instead of quantising bfloat16 ones at each update; the optimizer keeps its
    float32 weights. Needs optimizer.distributed."""

    @property
    def uses_fp8(self) -> bool:
        """Whether any matrix product is FP8."""
        return self.fp8 != "off"


EntryName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)]


_FIELDS = ("prompt", "answer")  # what a question is made from


def _columns_of_fields(columns: dict[str, str]) -> dict[str, str]:
    """Return the columns by field if the fields are known and no column is named twice."""
    for field in columns:
        if field not in _FIELDS:
            meant = did_you_mean(*closest(field, _FIELDS))
            raise ValueError("; ".join(filter(None, (f"must name prompt or answer, not {field}", meant))))
    if len(set(columns.values())) < len(columns):
        raise ValueError(f'must name two columns, not "{columns["prompt"]}" twice, for prompt and answer')
    return columns


class SourceConfig(Section):
    """A source of prompts."""

    source: Annotated[str, AfterValidator(SOURCE.known)] = "chains"
    """chains: the demo's modular arithmetic; programs: small functions to be found from examples; reasoning_gym: a
    procedural data set. Or rows: from your own file (jsonl), from a data set on the Hugging Face hub (hub), or from
    your own function, "my_package.my_module:my_rows"."""
    path: PathText | None = None
    """jsonl: the file, with one object per line that has the fields `prompt` and `answer`; or a JSON list (.json), CSV
    (.csv) or Parquet (.parquet). hub: the data set's name, such as "openai/gsm8k", or "openai/gsm8k@COMMIT"."""
    subset: str | None = None
    """hub: name of the subset (configuration), for a data set that has several."""
    split: str = "train"
    """hub: the split, or a part of it, such as "train[:1000]"."""
    format: Literal["plain", "math", "gsm8k", "humaneval"] = "plain"
    """Columns of the rows. plain: `prompt` and `answer`; math: MATH-500 and AIME; gsm8k; humaneval: programs, judged by
    their tests. All except plain also tell the model how to answer; see docs/evaluation.md."""
    fields: Annotated[dict[str, str], AfterValidator(_columns_of_fields)] = Field(default_factory=dict)
    """For rows: the columns with the prompt and the answer, if `format` names them differently:
    {prompt = "question", answer = "solution"}; "reward_model.ground_truth" is a value in an object."""
    dataset: str | None = None
    """reasoning_gym: name of the data set, such as "basic_arithmetic"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the source: chains {min_terms, max_terms}, programs {num_examples}, reasoning_gym: the data set's own
    settings; your own function: its arguments, by name."""
    size: Count = 10_000
    """Number of prompts that a procedural source makes before it repeats them in a new order."""

    @property
    def kind(self) -> SourceKind:
        """What kind of source it is, and what it reads."""
        return source_kind(self.source)

    @property
    def has_rows(self) -> bool:
        """Whether the prompts are rows (from a file, the hub or a function), not generated as needed."""
        return self.kind.has_rows

    @property
    def needs_path(self) -> bool:
        """Whether `path` names the rows."""
        return self.kind.path is not None

    @property
    def is_own_function(self) -> bool:
        """Whether your own function gives the rows."""
        return self.kind is OWN_ROWS

    @property
    def origin(self) -> str:
        """The name of the place that prompts come from: a file, a data set or a source."""
        return self.path if self.path is not None and self.needs_path else self.source


class NamedSource(SourceConfig):
    """A source of prompts with its own name."""

    name: EntryName
    """Name in metrics and reports: letters, digits, "-" and "_"."""

    @model_validator(mode="before")
    @classmethod
    def _fill_source(cls, value: Any) -> Any:
        """Treat an entry with a path and no source as a file."""
        return {"source": "jsonl", **value} if isinstance(value, dict) and "path" in value else value


class MixedSource(NamedSource):
    """An entry of [[data.sources]]. Each names its source as [data] does; with a path, `source` may be left out."""

    weight: Positive = 1.0
    """Its share of the prompts is this weight divided by the sum of all weights."""


class EvalSet(NamedSource):
    """An entry of [[eval.sets]]. Each names its source as [data] does; with a path, `source` may be left out."""

    num_prompts: Count = 64
    """Number of prompts, the same ones in each evaluation; a file with fewer is used completely."""
    samples_per_prompt: Count = 1
    """Responses to each prompt."""
    max_response_tokens: Count | None = None
    """Length limit of a response. Unset: rollout.max_response_tokens."""
    temperature: Positive = 1.0
    """Sampling temperature."""
    top_p: float = Field(1.0, gt=0, le=1)
    """As rollout.top_p."""
    top_k: Count | None = None
    """As rollout.top_k."""


def _named_apart(entries: tuple[NamedSource, ...]) -> tuple[NamedSource, ...]:
    """Check that the names give distinct metrics, also after Prometheus has normalised them."""
    names: dict[str, str] = {}
    for entry in entries:
        other = names.setdefault(key := entry.name.replace("-", "_"), "")
        if other == entry.name:
            raise ValueError(f'must have different names; "{entry.name}" is there twice')
        if other:
            raise ValueError(f'must have names that differ in more than "-" and "_", not "{other}" and "{entry.name}"')
        names[key] = entry.name
    return entries


def _local_time(value: Any) -> Any:
    """Return a time as text; TOML has a type of its own for it."""
    try:
        return (value if isinstance(value, datetime) else datetime.fromisoformat(value)).isoformat()
    except (TypeError, ValueError):
        raise ValueError('must be a date and a time, such as "2026-11-26T09:00:00"') from None


class DataConfig(SourceConfig):
    """Where prompts come from, and how they are presented to the model."""

    sources: Annotated[tuple[MixedSource, ...], AfterValidator(_named_apart)] = ()
    """[[data.sources]]: several sources instead of the single one in [data], mixed by weight; see docs/data.md."""
    chat_template: bool = False
    """Wrap each prompt in the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message for the chat template."""
    template_options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the chat template by name, such as {enable_thinking = false}; see the model's own documentation."""
    template_time: Annotated[str, BeforeValidator(_local_time)] | None = None
    """The time that the chat template reads, if it asks for one, such as "2026-11-26T09:00:00". Unset: when the run
    begins, which its config.toml keeps, so that a resume and an evaluation of the run see the same prompts."""
    max_prompt_tokens: Count = 512
    """A longer prompt is an error, or skipped (see on_bad_prompt)."""
    on_bad_prompt: Literal["error", "skip"] = "error"
    """What to do with a prompt that is empty, over-long, or refused by the chat template. Skipped prompts are counted
    in the metrics."""

    @property
    def only_in_template(self) -> list[str]:
        """The settings that are set and that only a chat template uses."""
        names = {"data.system_prompt": self.system_prompt is not None, "data.template_options": self.template_options}
        return [name for name, is_set in names.items() if is_set]


class RewardConfig(Section):
    """The judge of responses, and the shaping of its rewards."""

    kind: Annotated[str, AfterValidator(REWARD.known)] = "auto"
    """auto: the prompt source's verifier, such as math-verify for jsonl; or "chains", "reasoning_gym", "math"; text:
    compares words, such as "Paris", "B" or "yes"; code: runs the response's program against tests; or your own
    function, "my_package.my_module:my_function". none: no reward, for advantage.kind = "teacher"; rows need no answer
    then."""
    judges: dict[EntryName, Annotated[str, AfterValidator(REWARD.known)]] = Field(default_factory=dict)
    """Several judges instead of `kind`: {correct = "math", format = "my_rewards:has_box"}. Each gives the named part of
    the reward; the reward is their weighted sum."""
    weights: dict[EntryName, Annotated[float, Field(ge=-LARGEST, le=LARGEST)]] = Field(default_factory=dict)
    """Weights of the reward's parts by name: for every part that your judge returns; or for `judges`, where the default
    is 1. A part with weight 0 is only recorded."""
    timeout_s: Positive = 10.0
    """Deadline of one verification; a response that exceeds it is judged wrong and counted."""
    concurrency: Count | None = None
    """Concurrent verifications: processes for a plain function, calls for an async one.
    Unset: one process per core, at most 8; or 64 calls."""
    process_memory_mib: Count = 4096
    """Data memory of one process of a judge or an environment, in MiB; raise it for one that loads a model."""
    allowed_calls: Annotated[tuple[str, ...], AfterValidator(known_calls)] = ()
    """code: system calls that programs may make although the sandbox refuses them by default, such as "chmod"; see
    docs/security.md for the risks."""
    overlong_penalty: NonNegative = 0.0
    """Subtracted from the reward of a truncated response. It grows linearly over the last overlong_buffer_tokens before
    rollout.max_response_tokens (DAPO). It shapes advantages; the reward metrics show the verdict."""
    overlong_buffer_tokens: Whole = 0
    """Tokens before rollout.max_response_tokens over which overlong_penalty grows. 0: truncated responses only."""
    scale: Positive = 1.0
    """Factor applied to the shaped reward before advantages are computed."""
    running_std: bool = False
    """Divide the shaped rewards by the standard deviation of all rewards so far, this batch included (the reward
    scaling of PPO implementations, without a mean)."""
    clip: Positive | None = None
    """Bound the scaled reward to [-clip, clip], after scale and running_std. Unset: no bound."""

    @property
    def is_given(self) -> bool:
        """Whether somebody judges."""
        return self.kind != "none" or bool(self.judges)


class EnvironmentConfig(Section):
    """Several turns: an environment answers each turn of the policy, and gives the reward instead of a judge; see
    docs/turns.md."""

    kind: Annotated[str, AfterValidator(ENVIRONMENT.known)] = "none"
    """none: each response is one turn, and [reward] judges it; tools: runs the calls in a turn, and [reward] judges a
    turn without one; agent: a program that asks for turns (docs/agents.md); calculator: works out "12*34?"; guess: a
    number to be guessed; or your own function, "my_package.my_module:my_step"; or "replay:my_package.my_module:make",
    where make makes objects with reset(seed) and step(text)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment by name: tools {tools = ["calculator", "python", "my_module:search"], role, in_prompt},
    see docs/turns.md; agent {command}, the program and its arguments, where "{prompt}" becomes the prompt; calculator
    {cost, is_broken}, guess {max_guesses, is_silent}; your own function: its arguments after turn and state; replay:
    the arguments of make."""
    stop_tokens: tuple[str, ...] = ()
    """Tokens that end a turn, besides the end tokens in the model's files and, with data.chat_template, the template's
    end of a turn; each is one token of the tokenizer, such as "?" or "</tool_call>"."""
    max_turns: Count = 4
    """A sample that has taken this many turns ends (reason "turns"), with the rewards of its turns."""
    max_turn_tokens: Count | None = None
    """A turn that reaches this length ends, cut; the environment sees that. Unset: no limit besides
    rollout.max_response_tokens, which counts the policy's tokens of all turns."""
    max_answer_tokens: Count = 256
    """A longer answer of the environment is cut, without a mark, which would be one more thing to learn;
    environment/cut_answers counts them. Memory is planned for max_turns - 1 such answers; agent: these tokens, with
    data.max_prompt_tokens, are what a program's messages may have in all."""
    timeout_s: Positive = 30.0
    """Deadline of one answer, from when a process begins with it; agent: from a turn to the program's next request or
    end. A sample whose environment misses it, raises or dies fails: it gets no reward, and its group is trained without
    it."""
    concurrency: Count | None = None
    """As reward.concurrency: processes for a plain function, calls for an async one."""

    @property
    def is_used(self) -> bool:
        """Whether an environment answers the policy's turns."""
        return self.kind != "none"

    @property
    def is_agent(self) -> bool:
        """Whether a program asks for the policy's turns."""
        return self.kind == "agent"

    @property
    def turn_limit(self) -> int | None:
        """Length limit of a turn, besides the response's; None without one."""
        return self.max_turn_tokens if self.is_used else None

    @property
    def max_given_tokens(self) -> int:
        """Most tokens that a sample may be given after its prompt."""
        return (self.max_turns - 1) * self.max_answer_tokens if self.is_used else 0


class RolloutConfig(Section):
    """Sampling responses, in budgeted pieces (partial rollout)."""

    engine: Annotated[str, AfterValidator(ENGINE.known)] = "embedded"
    """embedded: our small torch engine in a separate process; sglang: SGLang servers started on this machine, with or
    without GPUs; attach: running SGLang-compatible servers (urls); recorded: no engine, batches come from a recorded
    run; or your own engine, "my_package.my_module:my_engine" (an EngineKind)."""
    record: bool = False
    """Keep every step's judged groups in the run's `rollouts` folder, for `recorded` and for analysis."""
    recorded_from: PathText | None = None
    """recorded: the `rollouts` folder of a run with record = true."""
    urls: tuple[str, ...] = ()
    """attach: base URLs of the servers, such as "http://127.0.0.1:30000"."""
    placement: Literal["separate", "split", "turns"] = "separate"
    """separate: trainer ranks and servers have GPUs of their own; split: both use the same GPUs, and the plan gives
    each a part of the memory; turns: each has the memory to itself while it works, and what the other holds moves to
    the machine's memory or is dropped; see docs/one-card.md."""
    num_servers: Processes = 1
    """embedded, sglang: how many servers to start."""
    server_tensor_parallel: Processes = 1
    """sglang: ranks that each server splits the model over."""
    prompts_per_step: int = Field(16, gt=0, le=1_000_000)
    """Groups trained in one step."""
    samples_per_prompt: int = Field(8, gt=0, le=65_536)
    """Responses in a group."""
    temperature: Positive = 1.0
    """Sampling temperature; behaviour and current log-probs both refer to the tempered distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample only from the smallest set of likeliest tokens with this total probability; 1 means all tokens. Below 1,
    behaviour log-probs are renormalised over this set, and current ones still cover all tokens: see docs/bapo.md."""
    top_k: Count | None = None
    """Sample only from this many likeliest tokens; with top_p, from the tokens that both allow. Unset: all."""
    max_response_tokens: Count = 512
    """A response that reaches this length is finished (reason "length")."""
    ignore_stop_tokens: tuple[str, ...] = ()
    """Tokens that do not end a turn although the model's files or its chat template say so, such as "<|endoftext|>";
    see docs/data.md."""
    truncated: Literal["keep", "mask"] = "keep"
    """keep: train on responses cut at max_response_tokens; mask: they count in the group's statistics only."""
    keep_group: Annotated[str, AfterValidator(KEEP_GROUP.known)] = "all"
    """Judged groups that enter the batch; the others are replaced. all; informative: groups whose responses got
    different rewards, because the others teach nothing (DAPO's dynamic sampling); or your own function,
    "my_package.my_module:keep_group"."""
    annotators: tuple[Annotated[str, AfterValidator(ANNOTATOR.known)], ...] = ()
    """Your own functions, "my_package.my_module:make", whose objects add values to the tokens of samples that have
    ended, for a loss to learn with, such as a teacher's log-probs; see docs/extending.md."""
    tokens_per_round: Count | None = None
    """Partial rollout: how many tokens a response may grow per round before it is set aside and resumed with later
    weights. Unset: every response is sampled to its end in one round."""
    groups_in_flight: Count | None = None
    """Groups sampled at the same time; more than prompts_per_step lets slow ones wait for a later step.
    Unset: prompts_per_step."""
    abort_tail: bool = False
    """Over-sampling: once a step has its groups, abort the responses still being sampled; they keep their tokens and
    resume in the next step. Useful with groups_in_flight above prompts_per_step."""
    overlap: bool = False
    """Sample while the trainer trains; running responses continue with new weights after each push. For engines on
    their own devices: on cores shared with the trainer it gains nothing."""
    max_staleness: Whole | None = None
    """Largest age of a token, in optimizer updates, in any update that trains it. Kept by admission: no response
    starts that might not be trained in time. Unset: no bound; overlap needs one."""
    max_concurrent_requests: Count = 256
    """Responses that a server samples at the same time; without overlap and abort_tail, the others wait inside the
    server."""
    request_timeout_s: Positive = 300.0
    """Deadline of one generate request; without overlap and abort_tail, of one round."""
    max_retries: Whole = 2
    """Retries of a request after a failed or malformed reply, before its server is fenced off."""
    startup_timeout_s: Positive | None = None
    """Deadline for a server to become healthy. Unset: 1800 for sglang, which on GPUs captures CUDA graphs and compiles
    kernels at its first start; otherwise 180."""
    max_restarts: Whole = 3
    """embedded, sglang: restarts of each server that has ended or hangs, after growing delays. A server that has used
    up its restarts stays down; the run continues with the others."""
    hang_timeout_s: Positive = 600.0
    """embedded, sglang: a server that has not answered for this long is killed and restarted. An SGLang server does not
    answer during a forward pass, or while it loads a bucket of weights: keep this above sync.timeout_s."""
    api_key: PathText | None = None
    """attach: file with the key that your servers ask for, such as SGLang's --api-key: one line, readable only by you.
    Engines that the run starts get a new key automatically."""
    engine_threads: Count | None = None
    """embedded, sglang: CPU threads of one engine process. Unset: its side's cores / processes. Trainer and engines
    take turns on all cores; with `overlap`, each side has half of them."""

    @property
    def shares_gpus(self) -> bool:
        """Whether trainer ranks and servers use the same GPUs."""
        return self.placement != "separate"

    @property
    def takes_turns(self) -> bool:
        """Whether trainer ranks and servers give each other the memory of the GPUs that they share."""
        return self.placement == "turns"

    @property
    def is_cut(self) -> bool:
        """Whether `top_p` or `top_k` may exclude tokens."""
        return self.top_p < 1 or self.top_k is not None


class AdvantageConfig(Section):
    """How advantages are computed from rewards."""

    kind: Annotated[str, AfterValidator(ADVANTAGE.known)] = "grpo"
    """One advantage per response, from its group: grpo: (r - mean) / std; dr_grpo: r - mean; rloo: r - mean of the
    others; max_rl: (r - mean) / mean, of rewards 0 and 1; gdpo: the sum of grpo of each part of the reward, by
    reward.weights, whitened over the batch's responses; reinforce_plus_plus_baseline: r - mean, whitened over the
    batch's trained tokens; or your own function, "my_package.my_module:my_advantage".
    One per turn: grpo_turns: grpo of the rewards from this turn on, discounted by gamma. One per token:
    reinforce_plus_plus: r, discounted by gamma and whitened over the batch's trained tokens, without a group; from a
    critic (see [critic]): gae: generalized advantage estimation; n_step: n-step returns; teacher: from [teacher] alone,
    without a reward."""
    whiten_batch: bool = False
    """Whiten the advantages over the responses of the batch."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount of later rewards, per token (gae, n_step, reinforce_plus_plus) or per turn (grpo_turns); 1 means none,
    as usual if the reward comes at the end."""
    lam: float = Field(1.0, ge=0, le=1)
    """gae: 1 is the whole return minus the value, without bias; a smaller one trusts the critic more: the reward fades
    by this factor per token, and values take its place."""
    n_step: Count = 128
    """n_step: tokens until the critic's value replaces the rest of the response."""
    whiten_tokens: bool = True
    """gae, n_step: give the advantages of a batch's trained tokens mean 0 and standard deviation 1, as PPO does."""

    @property
    def reads_rewards(self) -> bool:
        """Whether advantages depend on rewards, and not on a teacher alone."""
        return self.kind != FROM_TEACHER

    @property
    def compares_responses(self) -> bool:
        """Whether advantages compare rewards, of a group or of the batch, not a reward with a critic's values. True of
        a teacher, which has no critic either."""
        return self.kind not in WITH_CRITIC

    @property
    def needs_group(self) -> bool:
        """Whether a single response to a prompt teaches nothing."""
        is_own = self.kind not in (*ESTIMATORS, *WITH_CRITIC, FROM_TEACHER)
        return is_own or self._has("needs_group")

    @property
    def is_centred(self) -> bool:
        """Whether the advantages of each group are known to sum to 0, before they are whitened."""
        return self._has("needs_group")

    @property
    def is_per_token(self) -> bool:
        """Whether the tokens of a turn may have different advantages."""
        is_of_tokens = self.kind in ESTIMATORS and ESTIMATORS[self.kind].discounts == "tokens"
        return self.kind in (*WITH_CRITIC, FROM_TEACHER) or is_of_tokens

    @property
    def whitens(self) -> Literal["", "responses", "tokens"]:
        """What in the batch advantages are whitened over; `whiten_tokens` says it of a critic's."""
        of_kind: Literal["", "responses", "tokens"] = ESTIMATORS[self.kind].whitens if self.kind in ESTIMATORS else ""
        return of_kind or ("responses" if self.whiten_batch else "")

    @property
    def discounts(self) -> bool:
        """Whether gamma may matter; a function of your own can read it."""
        return self.reads_rewards and (self.kind not in ESTIMATORS or self._has("discounts"))

    @property
    def needs_binary(self) -> bool:
        """Whether rewards must be 0 or 1."""
        return self._has("needs_binary")

    @property
    def reads_parts(self) -> bool:
        """Whether the parts of a verdict count, in place of their sum."""
        return self._has("reads_parts")

    @property
    def divides_by_group(self) -> bool:
        """Whether a statistic of its rewards divides each group, so that scaling rewards has no effect."""
        return self._has("divides_by_group")

    def _has(self, trait: str) -> bool:
        return self.kind in ESTIMATORS and bool(getattr(ESTIMATORS[self.kind], trait))


class CriticConfig(Section):
    """The critic for advantage.kind = "gae" and "n_step": a second model in the trainer, split like the policy, which
    predicts rewards. It uses the Adam settings of [optimizer], except where set here."""

    path: PathText | None = None
    """Folder with its initial weights: a language model, or a model with a one-row score.weight instead of the output
    layer (a reward model, or a checkpoint's critic). Unset: model.path. A new head starts at zero."""
    lr: Positive = 1e-5
    """Learning rate, constant."""
    warmup_steps: Whole = 0
    """Steps at the start of the run that train only the critic, on responses of the unchanged policy."""
    epochs_per_step: Count = 1
    """The critic's passes over each rollout batch, of train.minibatches_per_step updates each."""
    clip: Positive | None = None
    """Value clipping: a token has no gradient once its value has moved towards its return by more than this within a
    step. Unset: no clipping."""


def _hint(text: str) -> str:
    """Check the words around a prompt. Raises ValueError."""
    try:
        fields = hint_fields(text)
    except ValueError:
        raise ValueError("must have its braces in pairs: write one that stands for itself twice") from None
    if "prompt" not in fields or fields - {"prompt", "answer"} or text.strip() == "{prompt}":
        raise ValueError('must hold {prompt} and more words, such as "{prompt} The answer is {answer}."')
    return text


def hint_fields(text: str) -> set[str]:
    """Return what a hint has in braces, without keys. Raises ValueError. Example: "{answer[a]} {{b}}" has "answer"."""
    return {name.split("[")[0] for _, name, _, _ in string.Formatter().parse(text) if name is not None}


TEACHERS = ("path", "path_by_source", "urls", "urls_by_source", "hint")
"""Settings of [teacher] that name one."""


class TeacherConfig(Section):
    """A teacher scores each sampled token once, in the trainer (path), on servers of your own (urls), or as the policy
    itself with a hint. A token's advantage is coef x (log teacher - log sampler), see docs/teacher.md. With
    advantage.kind = "teacher" there is no other; with any other kind without a critic it is added to the reward's. With
    top_k, the loss gets a divergence from the teacher instead."""

    path: PathText | None = None
    """The Hugging Face folder, or name on the hub, of a frozen model that the trainer holds, split like the policy; it
    has the policy's tokenizer. A run that names a teacher in no
    way has none."""
    path_by_source: dict[EntryName, PathText] = Field(default_factory=dict)
    """Several teachers: the model, as in path, for each of data.sources, by its name. The trainer holds each model
    once, and each scores the samples of its sources."""
    urls: tuple[str, ...] = ()
    """Base URLs of servers of one teacher that score samples as they end, such as "http://127.0.0.1:30000": SGLang, or
    `bapo serve`."""
    urls_by_source: dict[EntryName, tuple[str, ...]] = Field(default_factory=dict)
    """Several teachers: the servers of the teacher for each of data.sources, by its name."""
    hint: Annotated[str, AfterValidator(_hint)] | None = None
    """Words of the user that tell more than the prompt, such as "{prompt} The answer is {answer}.", with the row's own:
    after them, the policy's own weights score each sample that ends, on the run's servers. In a conversation they take
    the place of the user's last message."""
    api_key: PathText | None = None
    """urls, urls_by_source: as rollout.api_key."""
    timeout_s: Positive = 600.0
    """On servers: deadline for the scores of a sample, which learns nothing from the teacher without them."""
    coef: Positive = 1.0
    """Weight of the teacher's advantage; with top_k, of its divergence."""
    top_k: Whole = 0
    """path, path_by_source: the loss of each update gets coef x the divergence on each token's top_k likeliest tokens
    and all others together. 0: the teacher gives an advantage instead."""
    divergence: Divergence = "reverse"
    """forward: sum of q log(q / p), with q the teacher's and p the policy's probabilities; reverse: of p log(p / q)."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(given := [name for name in TEACHERS if getattr(self, name)]) > 1:
            names = " and ".join(f"teacher.{name}" for name in given[1:])
            raise ContradictionError(Violation(tuple(given), f"names a teacher, as {names} does", "leave one of them"))
        return self

    @property
    def given(self) -> str:
        """The setting that names the teacher; "" without one."""
        return next((f"teacher.{name}" for name in TEACHERS if getattr(self, name)), "")

    @property
    def paths(self) -> dict[str, str]:
        """The models that the trainer holds, each once, by the first setting that names it."""
        named = {} if self.path is None else {"teacher.path": self.path}
        named |= {f"teacher.path_by_source.{name}": path for name, path in self.path_by_source.items()}
        first = {path: setting for setting, path in reversed(named.items())}
        return {setting: path for setting, path in named.items() if first[path] == setting}

    @property
    def all_urls(self) -> tuple[str, ...]:
        """The servers of all teachers."""
        return (*self.urls, *(url for urls in self.urls_by_source.values() for url in urls))

    @property
    def is_served(self) -> bool:
        """Whether servers score samples as they end."""
        return bool(self.all_urls or self.hint)


class OptimizerConfig(Section):
    """Adam, through Megatron-Core."""

    lr: Positive = 1e-6
    """Learning rate after warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or down to lr x min_lr_ratio at the last of total_updates."""
    warmup_updates: Whole = 0
    """Linear warm-up over this many optimizer updates."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """linear, cosine: where the learning rate ends, as a share of lr."""
    total_updates: Count | None = None
    """linear, cosine: the update at which the rate reaches the floor, where it stays. Unset: train.num_steps x
    minibatches_per_step x epochs_per_step; set it if the run may be extended later."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay (AdamW) for matrices, but not for norms and biases, as in Megatron."""
    beta1: float = Field(0.9, gt=0, lt=1)
    """Decay of Adam's first moment."""
    beta2: float = Field(0.95, gt=0, lt=1)
    """Decay of Adam's second moment."""
    eps: Positive = 1e-8
    """Added to the root of Adam's second moment."""
    clip_grad: Positive = 1.0
    """Largest global gradient norm."""
    distributed: bool = False
    """Split Adam's state (and the float32 copy of bfloat16 weights) over the data and context ranks, with Megatron's
    distributed optimizer. The update is the same and takes less memory."""


_FORWARDS_FIRST_SHARE = 0.1  # share of device memory that train.schedule = "auto" allows for an update's layer inputs


AHEAD_BYTES = 64 * 2**20
"""A push: the first rank of a later pipeline stage sends at most this much ahead of rank 0, and one tensor more."""

MAX_KEYS_PER_TOKEN = 8
"""train.share_prompts: attention gathers at most this many keys for each token that a micro-batch may have."""


class TrainConfig(Section):
    """The length of the run, and how each rollout batch is used."""

    num_steps: Count = 100
    """Rollout batches to train on."""
    rollout_only: bool = False
    """Sample, judge and record without any update: to measure engines and rewards, or to make recordings."""
    minibatches_per_step: Count = 1
    """Optimizer updates per pass over a rollout batch; the later ones train on older samples (staleness)."""
    epochs_per_step: Count = 1
    """Passes over each rollout batch (sample replay)."""
    max_tokens_per_microbatch: Count = 8192
    """Packed tokens in one forward pass of one rank; a longer sequence gets its own micro-batch. With context
    parallelism, parallel.context ranks share a pack, which holds that many times more."""
    share_prompts: bool | None = None
    """Compute the prompt of several responses in a micro-batch once, in updates and in scores. Context parallelism and
    models with linear attention compute each copy. Unset: where that saves more than a tenth of a step's tokens if
    prompts and responses are as long as they may be."""
    deal: Literal["sequences", "groups"] = "sequences"
    """What a pass deals to its updates at random. groups: an update gets all responses to a prompt, so that
    share_prompts saves most."""
    logprob_chunk_tokens: Count | None = None
    """Rows whose logits exist at the same time when log-probs are computed. Unset: on a GPU as many as make 1 GiB of
    float32 logits, with cluster.gpu 2048 to 4096 if the plan still leaves a tenth of the memory free; on a CPU 256."""
    logprob_backend: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of log-probs. triton: one kernel reads a chunk of logits once instead of several times, and
    needs a GPU; auto: triton on a GPU, otherwise torch."""
    entropy_coef: NonNegative = 0.0
    """Weight of an entropy bonus in the loss."""
    recompute: bool | None = None
    """Recompute activations in the backward pass: all of them, unless recompute_layers or recompute_modules is set.
    Unset: with cluster.gpu, as many layers as the plan needs to leave a tenth of the memory free; otherwise none. The
    run's config.toml has the answer."""
    recompute_layers: Count | None = None
    """recompute: only the first N layers of each pipeline stage (of each chunk, with virtual_pipeline); the others keep
    their activations. Unset: all layers."""
    recompute_modules: tuple[Literal["core_attn", "mlp"], ...] = ()
    """recompute: only these parts of each layer. mlp: most of the activations; core_attn: attention without its
    projections, worthwhile for local layers with context parallelism. Not with recompute_layers."""
    schedule: Literal["auto", "forwards_first", "interleaved"] = "auto"
    """The order of passes with scope exact. forwards_first: run all forward passes of an update, whose log-probs
    determine the bounds, before its backward passes, and keep all activations in between; interleaved: score in an
    extra pass. auto: forwards_first with one micro-batch, or with all layers recomputed while their inputs take less
    than a tenth of memory."""

    @property
    def recomputes_all(self) -> bool:
        """Whether only the layers' inputs are kept."""
        return bool(self.recompute) and self.recompute_layers is None and not self.recompute_modules

    def forwards_first(
        self, num_microbatches: int, *, num_stages: int, layer_input_bytes: float, memory_bytes: float | None
    ) -> bool:
        """Return whether `schedule` puts all forward passes of a mini-batch before its backward passes.

        `auto` does so if it needs little more memory than the other order (measured in docs/performance.md): with one
        micro-batch, or if only the layers' inputs are kept (`recompute`).

        Args:
            num_stages: `parallel.pipeline`.
            layer_input_bytes: inputs of a rank's layers for all these micro-batches.
            memory_bytes: memory of the smallest device; None if unknown.
        """
        if num_stages > 1 or self.schedule == "interleaved":
            return False
        if self.schedule == "forwards_first" or num_microbatches == 1:
            return True
        if not self.recomputes_all or memory_bytes is None:
            return False
        return layer_input_bytes <= _FORWARDS_FIRST_SHARE * memory_bytes

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.recompute_layers is not None and self.recompute_modules:
            text = "chooses whole layers, and train.recompute_modules parts of all layers"
            names = ("recompute_layers", "recompute_modules")
            raise ContradictionError(Violation(names, text, "leave one of them out"))
        return self


_MAX_RANKS = 1_048_576


class ParallelConfig(Section):
    """How the trainer is split over processes. ranks = tensor x pipeline x context x data."""

    tensor: Processes = 1
    """Ranks that share each layer; must divide attention heads, key-value heads and feed-forward rows."""
    pipeline: Processes = 1
    """Number of pipeline stages; must divide the number of layers, unless last_stage_layers is set."""
    last_stage_layers: Processes | None = None
    """Layers of the last stage, for models whose layers no useful number of stages divides: the other stages share the
    rest evenly. 94 layers over 4 stages: 22, and 24 on each of the others. Unset: as many as the others."""
    virtual_pipeline: Processes = 1
    """Chunks of layers on each stage, visited in turn: smaller bubbles, more messages. Values above 1 need pipeline
    stages, and pipeline x virtual_pipeline must divide the number of layers."""
    context: Processes = 1
    """Ranks that share each sequence, for long sequences: attention gathers keys and values; everything else stays
    split."""
    data: Processes = 1
    """Copies of the model, each with a share of every mini-batch. If it is left out and num_ranks is given:
    num_ranks / (tensor x pipeline x context)."""
    expert: Processes = 1
    """Ranks that share out the experts of each layer, for mixtures of experts; must divide their number, and tensor x
    context x data. With 1, tensor-parallel ranks split every expert."""
    sequence: bool = False
    """Sequence parallelism inside the tensor-parallel group. Mixtures of experts need it there."""
    overlap_communication: bool = False
    """Sum gradients over data and context ranks during the last backward pass instead of after it, and with
    optimizer.distributed gather updated weights during the next forward pass."""
    num_ranks: Processes | None = None
    """Number of ranks that you mean to start; checked against the product."""
    threads_per_rank: Processes | None = None
    """CPU threads of one trainer process. Unset: cores / ranks, at least 1; with rollout.overlap only half of the cores
    count, because the engines have the others. In a SLURM job: the cores that it gives each task."""
    bind_cpus: bool = True
    """With GPUs, run each rank, and the judges of rank 0, on the CPUs next to its GPU (its NUMA node)."""
    timeout_s: Positive = 600.0
    """Deadline of one collective between trainer ranks."""

    @property
    def size(self) -> int:
        """Number of trainer ranks: tensor x pipeline x context x data."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def expert_tensor(self) -> int:
        """Ranks that split one expert: Megatron sums gradients rightly only for all tensor ranks, or for one."""
        return self.tensor if self.expert == 1 else 1

    def stage_sizes(self, num_layers: int) -> list[int]:
        """Return the number of layers of each stage, for a model that `learner.fit` accepts."""
        if self.last_stage_layers is None or self.pipeline == 1:
            return [num_layers // self.pipeline] * self.pipeline
        others = (num_layers - self.last_stage_layers) // (self.pipeline - 1)
        return [others] * (self.pipeline - 1) + [self.last_stage_layers]

    @model_validator(mode="before")
    @classmethod
    def _fill_data(cls, value: Any) -> Any:
        """Derive `data` from num_ranks, so that a cluster's file need not know the split."""
        if not isinstance(value, dict) or "data" in value or not isinstance(value.get("num_ranks"), int):
            return value
        sizes = [value.get(name, 1) for name in ("tensor", "pipeline", "context")]
        if not all(type(size) is int and size > 0 for size in sizes):
            return value  # each of these has its own check
        data, rest = divmod(value["num_ranks"], math.prod(sizes))
        return value if rest or data < 1 else {**value, "data": data}

    @model_validator(mode="after")
    def _check(self) -> Self:
        sizes = {name: getattr(self, name) for name in ("tensor", "pipeline", "context", "data")}
        if (ranks := self.size) > _MAX_RANKS:
            product = " x ".join(f"{name} {size}" for name, size in sizes.items())
            text = f"is one factor of {product} = {ranks} ranks, and there may be {_MAX_RANKS} at most"
            raise ContradictionError(Violation(tuple(sorted(sizes, key=lambda name: -sizes[name])), text))
        return self


class ClusterConfig(Section):
    """The machines that a run is meant for. If `gpu` is set, `bapo check` plans for them instead of this machine:
    trainer ranks take the first GPUs, SGLang servers the next ones."""

    gpu: (
        Literal[
            "a100", "h100", "h200", "h20", "b200", "b300", "gb200",
            "l4", "l40s", "a10", "a10g", "a40", "a6000", "rtx3090", "rtx4090", "rtx5090",
        ]
        | None
    ) = None  # fmt: skip
    """Kind of GPU, with its usual memory; a100 and h100 are SXM boards with 80 GB. Unset: this machine."""
    nodes: Processes = 1
    """Number of machines."""
    gpus_per_node: int = Field(8, gt=0, le=256)
    """GPUs of each machine, connected by NVLink, or by PCIe if they are cards."""
    gpu_memory_gib: float | None = Field(None, gt=0, le=100_000)
    """GPU memory that a process can use. Unset: the usual amount for this kind of GPU."""


_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<hours>\d+):(?P<minutes>[0-5]\d):(?P<seconds>[0-5]\d)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SlurmConfig(Section):
    """The job that `bapo slurm` writes. [cluster] sets its nodes and GPUs."""

    runtime: Literal["venv", "pyxis", "apptainer"] = "venv"
    """What runs Python on a node. venv: an interpreter on a shared file system; pyxis: `srun --container-image`
    (enroot); apptainer: `apptainer exec`."""
    python: PathText | None = None
    """The interpreter. Unset: the one that runs `bapo slurm`; in a container: python."""
    container_image: PathText | None = None
    """pyxis, apptainer: file of the image, or its address in a registry: for pyxis "docker://registry#image:tag", for
    apptainer "docker://registry/image:tag"."""
    container_mounts: tuple[str, ...] = ()
    """Folders, or "folder:inside", to mount besides the working folder, run.dir, and the paths of models and data."""
    rollout_nodes: Whole | None = None
    """How many of the nodes, the last ones, run only engines. 0: each node has trainer ranks on its first GPUs and
    engines on the next. Unset: as many as SGLang's servers fill, otherwise 0."""
    spare_nodes: Whole = 0
    """Nodes in addition to cluster.nodes that wait for a trainer node to fail (run.max_restarts)."""
    time_limit: str | None = None
    """Longest time of one job, as D-HH:MM:SS or HH:MM:SS. Unset: the partition's default."""
    options: tuple[str, ...] = ()
    """More options for sbatch, such as "--partition=gpu", "--account=team", "--exclusive", "--cpus-per-task=8" for each
    trainer rank, or "--no-requeue" if jobs must not be queued again (see chain)."""
    setup: tuple[str, ...] = ()
    """Lines of bash that the job runs first on its first node, such as "module load cuda"."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables for all processes, such as { NCCL_IB_HCA = "mlx5" }. Do not put keys such as WANDB_API_KEY
    here: settings are stored in the job's script, config.toml and report.html, and sent to W&B. sbatch passes on your
    own environment."""
    interface: str | None = None
    """Network interface that connects the nodes, such as "ib0". Unset: whatever a node's host name resolves to, and
    NCCL's own choice; loopback with one node."""
    stop_before_end_s: Count = 300
    """Seconds before the time limit at which the run is asked to finish its step, save and stop. Make it longer than a
    step and a checkpoint."""
    chain: int = Field(1, gt=0, le=1000)
    """Jobs to submit; each continues from the one before. With 1, the job is queued again after such a stop, unless
    options have "--no-requeue"; SLURM also queues it again after preemption and node failure."""
    sweep: tuple[str, ...] = ()
    """Each entry is one task of a job array: settings, separated by blanks, such as "optimizer.lr=1e-6 bapo.rho0=0.4".
    Task i is the run `<run.name>-<i>`. Ranks, engines and nodes are the same in all tasks."""
    startup_timeout_s: Positive = 900.0
    """Deadline for the processes of a job to find each other: nodes may load an image at different speeds."""

    @property
    def requeues(self) -> bool:
        """Whether a job may be queued again."""
        return "--no-requeue" not in self.options

    @field_validator("time_limit")
    @classmethod
    def _is_a_time(cls, text: str | None) -> str | None:
        if text is not None and seconds_of(text) == 0:
            raise ValueError(f'must be a time above 0, as HH:MM:SS or D-HH:MM:SS, such as "08:00:00", got "{text}"')
        return text

    @field_validator("environment")
    @classmethod
    def _has_names(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f'must have names of variables, such as NCCL_IB_HCA, got "{name}"')
        return environment

    @field_validator("options", "setup", "sweep", "container_mounts")
    @classmethod
    def _are_lines(cls, lines: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for line in lines:
            if "\n" in line or not line.strip():
                raise ValueError("must be lines of text, each in its own entry")
            if info.field_name == "options" and not line.startswith("-"):
                raise ValueError(f'must be options of sbatch, such as "--constraint=nvlink", got "{line}"')
        return lines


def seconds_of(time_limit: str) -> int:
    """Return the seconds of D-HH:MM:SS or HH:MM:SS; 0 for anything else."""
    match = _TIME.fullmatch(time_limit)
    if match is None:
        return 0
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _in_order(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    if not targets:
        raise ValueError("must name at least one linear layer")
    return tuple(one for one in TARGETS if one in targets)


class LoraConfig(Section):
    """LoRA: adapters on the linear layers are trained, the model's own weights stay (docs/lora.md)."""

    rank: Count | None = None
    """Rank of the adapters, such as 16. Unset: all weights are trained."""
    alpha: Positive = 32.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: Annotated[tuple[Target, ...], AfterValidator(_in_order)] = TARGETS
    """Linear layers with adapters, by PEFT's names."""
    init_from: PathText | None = None
    """A PEFT folder with adapters to start from. Unset: A is random and B zero, so that the model starts as it is."""

    @property
    def adapters(self) -> Adapters | None:
        """The model's adapters; None if all weights are trained."""
        return None if self.rank is None else Adapters(self.rank, self.alpha, self.targets)


class SyncConfig(Section):
    """Weight sync from trainer to engines."""

    channel: Literal["broadcast", "disk"] | None = None
    """broadcast: over one process group with all engines, NCCL if the trainer has a GPU and the engines are SGLang's,
    otherwise gloo; disk: through files that every engine can read. Unset: disk if rollout.placement shares GPUs,
    otherwise broadcast."""
    folder: PathText | None = None
    """disk: where to keep the two latest versions of the weights, in a folder that only you can read and that ends with
    the run. Every engine must see it. Unset: if rollout.placement shares GPUs, in memory, /dev/shm; otherwise in the
    run's own folder."""
    bucket_mib: float = Field(64.0, gt=0, le=1_000_000)
    """broadcast: size of a bucket of weights, gathered and sent together. Two are held: one being sent, one being
    gathered."""
    timeout_s: Positive = 120.0
    """Deadline of each stage of a weight update; an engine that misses it is fenced off."""


class EvalConfig(Section):
    """Evaluation of the current weights during the run, on one unnamed set of prompts, or on `sets`."""

    interval_steps: Count | None = None
    """Evaluate every N steps, and before the first and after the last. Unset: never."""
    path: PathText | None = None
    """jsonl: the file with the prompts to evaluate. Other sources draw them with a separate seed."""
    num_prompts: Count = 64
    """Number of prompts, the same ones in each evaluation."""
    samples_per_prompt: Count = 1
    """Responses to each prompt."""
    temperature: Positive = 1.0
    """Sampling temperature of the evaluation."""
    top_p: float = Field(1.0, gt=0, le=1)
    """As rollout.top_p, for the evaluation."""
    top_k: Count | None = None
    """As rollout.top_k, for the evaluation."""
    sets: Annotated[tuple[EvalSet, ...], AfterValidator(_named_apart)] = ()
    """[[eval.sets]]: named sets, all used in each evaluation instead of the unnamed set, whose settings then have no
    effect; see docs/evaluation.md."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    interval_steps: Count | None = 20
    """Save every N steps, and after the last; before the first N also after 1, 2, 4, 8, ... steps. Unset: only if the
    run is stopped."""
    keep_last: Count = 2
    """Checkpoints kept; older ones are deleted after a newer one is complete."""
    asynchronous: bool = False
    """Copy weights and optimizer state to CPU memory (12 bytes per parameter, divided among the ranks; kept for the
    next save) and write them while training continues; the checkpoint is valid from the first step boundary at which
    all ranks have written theirs."""

    def is_due(self, num_done: int, num_steps: int) -> bool:
        """Return whether to save after `num_done` of `num_steps` steps: at each interval and at the end; before the
        first interval after 1, 2, 4, 8, ... steps, so that a crash loses less than half of a young run."""
        interval = self.interval_steps
        if interval is None:
            return False
        is_early = num_done < interval and num_done.bit_count() == 1
        return is_early or num_done % interval == 0 or num_done == num_steps


SinkName = Literal["tensorboard", "wandb"]


class MonitorConfig(Section):
    """Progress, alarms, reports and metric sinks."""

    progress: Literal["auto", "bar", "lines"] = "auto"
    """auto: a progress bar in a terminal, plain lines elsewhere."""
    samples_per_step: Whole = 2
    """Trajectories written to samples.jsonl each step."""
    mismatch_alarm: Positive | None = None
    """Warn if the log-probs of engine and trainer for the same weights differ by more than this (mean |difference| over
    an update, in nats). Unset: 0.001 with float32, 0.05 with bfloat16; never where they differ by design: with
    rollout.top_p or top_k, and with model.replay_routes if responses are resumed. 1e9 means never."""
    mismatch_action: Literal["warn", "stop"] = "warn"
    """What follows a mismatch besides the warning. stop: the run ends after the step and does not save its weights, so
    that the same command continues from the checkpoint before."""
    judge_alarm: float = Field(0.05, ge=0)
    """Warn in each step in which the judge failed on more than this share of the responses (errors and timeouts, which
    count as wrong), or the environment on more of its turns; 1 means never. One that fails on all of the first ends
    the run."""

    token_profile: bool = False
    """Record ratios, entropy and clipping for ten bins of token probability (profile/*): sixty numbers per step."""

    grad_norm_alarm: Positive | None = None
    """Count an update as a spike also if its gradient norm before clipping exceeds this. A norm over 10 times the
    median of the last 101 (at least 11) always counts. The run warns if many updates are spikes."""

    sinks: tuple[SinkName, ...] = ()
    """Destinations of metrics besides metrics.jsonl, which is always written first. tensorboard: the run's folder
    `tensorboard`; wandb: Weights & Biases, set by its own environment variables: WANDB_PROJECT (default
    "bapo-megatron"), WANDB_ENTITY, WANDB_MODE (offline writes only to the run's folder `wandb`), and WANDB_API_KEY,
    unless `wandb login` has stored the key. A failing sink is reported once, counted, and never stops the run."""
    prometheus_port: int | None = Field(None, ge=0, le=65535)
    """Serve the latest metrics and the engines' states to Prometheus on this port of 127.0.0.1, on trainer rank 0's
    machine. 0: any free one, which the log names. Unset: no endpoint."""
    profile_steps: tuple[Count, ...] = ()
    """Steps, counted from 1, that are traced into the run's folder `profile`, for Perfetto or chrome://tracing: one
    trace by trainer rank 0, and one by each engine. Tracing slows these steps down."""

    def mismatch_limit(self, dtype: str, *, is_expected: bool = False) -> float:
        """Return `mismatch_alarm`, or a limit that float32 and bfloat16 never reach while engine and trainer agree.

        Args:
            is_expected: see `Config.expects_mismatch`.
        """
        if self.mismatch_alarm is not None:
            return self.mismatch_alarm
        if is_expected:
            return math.inf
        return 1e-3 if dtype == "float32" else 0.05


class MegatronConfig(Section):
    """Upstream settings, passed through."""

    extra: dict[str, Any] = Field(default_factory=dict)
    """Fields of megatron.core TransformerConfig, set last; an unknown field is an error."""


class SglangConfig(Section):
    """Settings of the SGLang servers that a run starts, passed through."""

    extra: dict[str, Any] = Field(default_factory=dict)
    """Arguments of sglang.launch_server, such as { mem_fraction_static = 0.5 }, set last; true is a bare flag, false
    leaves one out."""


class Config(Section):
    """One run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    loss: AnyLoss = Field(default_factory=LOSSES[DEFAULT])
    bapo: ClipBoundConfig = Field(default_factory=ClipBoundConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    teacher: TeacherConfig = Field(default_factory=TeacherConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    slurm: SlurmConfig = Field(default_factory=SlurmConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    sglang: SglangConfig = Field(default_factory=SglangConfig)

    @property
    def prompt_sources(self) -> dict[str, SourceConfig]:
        """Sources of training prompts, by the table that describes them: "data", or "data.sources.NAME"."""
        mixed: dict[str, SourceConfig] = {f"data.sources.{one.name}": one for one in self.data.sources}
        return mixed or {"data": self.data}

    @property
    def eval_sets(self) -> dict[str, EvalSet]:
        """Sets of one evaluation, by their table: "eval.sets.NAME", or "eval" for the one set whose name is ""."""
        return {f"eval.sets.{one.name}": one for one in self.eval.sets} or {"eval": self.unnamed_eval_set}

    @property
    def unnamed_eval_set(self) -> EvalSet:
        """The set that [eval] itself describes, with the kind of prompts that [data] describes."""
        kind = {name: getattr(self.data, name) for name in SourceConfig.model_fields}
        own = {name: getattr(self.eval, name) for name in EvalSet.model_fields if name in EvalConfig.model_fields}
        return EvalSet.model_construct(name="", **kind | own)

    @property
    def prompt_files(self) -> dict[str, str]:
        """Files of prompts that settings name, by setting, such as "data.path"."""
        tables = {"data": self.data, **self.prompt_sources, **self.eval_sets}
        files = {f"{table}.path": one.path for table, one in tables.items() if one.kind.path != "data set"}
        files.setdefault("eval.path", self.eval.path)
        return {setting: path for setting, path in files.items() if path is not None}

    @property
    def longest_trained(self) -> int:
        """Number of tokens in the longest sequence that may be trained: prompt, response and environment's answers."""
        return self._context_tokens + self.rollout.max_response_tokens

    @property
    def class_top_k(self) -> int:
        """Number of tokens at each place whose log-probs the loss reads in addition to the sampled one's."""
        return self.teacher.top_k or self.loss.sampler_top_k

    @property
    def expects_mismatch(self) -> bool:
        """Whether engine and trainer differ by design on tokens of age 0: their log-probs cover other tokens, or the
        earlier tokens of resumed responses keep experts that the engine has chosen again."""
        r = self.rollout
        is_resumed = r.tokens_per_round is not None or r.abort_tail or r.overlap
        return r.is_cut or (self.model.replay_routes and is_resumed)

    @property
    def has_judge(self) -> bool:
        """Whether [reward] gives rewards: of single turns, turns that call no tool, or agents if it names a judge."""
        is_named = self.reward.kind != "auto" or bool(self.reward.judges)
        return self.environment.kind in ("none", "tools") or (self.environment.is_agent and is_named)

    @property
    def shares_gpus(self) -> bool:
        """Whether trainer ranks and servers use the same GPUs."""
        return self.rollout.shares_gpus

    @property
    def takes_turns(self) -> bool:
        """Whether trainer ranks and servers give each other the memory of the GPUs that they share."""
        return self.rollout.takes_turns

    @property
    def sync_channel(self) -> Literal["broadcast", "disk"]:
        """The channel that weights take: the user's choice, or else the one that the placement allows."""
        return self.sync.channel or ("disk" if self.shares_gpus else "broadcast")

    @property
    def longest_sequence(self) -> int:
        """Number of tokens in the longest sequence that engines may be asked for, in training or evaluation."""
        sets = self.eval.sets if self.eval.interval_steps is not None else ()
        responses = [self.rollout.max_response_tokens, *(one.max_response_tokens or 0 for one in sets)]
        return self._context_tokens + max(responses)

    @property
    def _context_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.environment.max_given_tokens

    def divide_cores(self, num_cores: int, num_ranks: int, num_engine_processes: int) -> tuple[int, int]:
        """Return the threads of a trainer rank and of an engine process, on a machine with this many of each.

        Each side takes all cores in turn. With rollout.overlap both run at the same time and share the cores: half
        each, or what the other side's setting leaves. A process has at least one thread.
        """
        per_rank, per_engine = self.parallel.threads_per_rank, self.rollout.engine_threads
        for_trainer = for_engines = num_cores
        if self.rollout.overlap and num_ranks and num_engine_processes:
            for_engines = num_cores // 2 if per_rank is None else num_cores - per_rank * num_ranks
            for_trainer = num_cores - (for_engines if per_engine is None else per_engine * num_engine_processes)
        return (
            per_rank or max(1, for_trainer // max(1, num_ranks)),
            per_engine or max(1, for_engines // max(1, num_engine_processes)),
        )

    def with_prompts_of(self, source: SourceConfig) -> "Config":
        """Return this configuration with `source` instead of [data]'s own source of prompts."""
        fields = {name: getattr(source, name) for name in SourceConfig.model_fields}
        return self.model_copy(update={"data": self.data.model_copy(update={**fields, "sources": ()})})

    @property
    def rule_reads(self) -> RuleReads:
        """Tokens that the loss's update rule reads."""
        return self.loss.rule_reads(self.bapo)

    @property
    def searches_bounds(self) -> bool:
        """Whether the clip bounds of an update come from a search."""
        return self.loss.searches_bounds and self.bapo.scope != "fixed"
