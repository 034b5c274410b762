"""Every setting, with its type, default and meaning. One TOML table per section.

Checks of one field live here; checks across sections (layout, batch arithmetic, model shapes) live in `plan.py`.
"""

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from bapo_megatron.config.base import Section
from bapo_megatron.config.dotted import KEEP_GROUP, REWARD
from bapo_megatron.config.engines import ENGINE, EngineKind, engine_kind
from bapo_megatron.config.layout import ClusterConfig, ParallelConfig
from bapo_megatron.config.schema_advantage import AdvantageConfig, CriticConfig
from bapo_megatron.config.schema_loss import AnyLoss, BapoLoss, ClipBoundConfig
from bapo_megatron.config.schema_monitor import MonitorConfig
from bapo_megatron.config.schema_slurm import SlurmConfig


class RunConfig(Section):
    """Name, folder and seed of the run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run directory; running the same name again resumes it."""
    dir: str = "runs"
    """Folder that holds all run directories."""
    seed: int = Field(0, ge=0)
    """Seeds prompt order, sampling, mini-batch order. On a CPU, with embedded engines and neither overlap nor
    abort_tail, the same seed, layout and threads give the same run bit for bit, interrupted or not; else see
    docs/architecture.md, Resuming."""


class ModelConfig(Section):
    """The policy: a Hugging Face checkpoint folder (Qwen2, Qwen3 or Llama, dense)."""

    path: str = "demo"
    """Folder with config.json, safetensors and tokenizer; or a name on the Hugging Face hub, such as "Qwen/Qwen3-0.6B",
    which is downloaded, and pinned as "Qwen/Qwen3-0.6B@COMMIT" in the run's config.toml; "demo" is the small model that
    ships with the package."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations. Keep float32 on a CPU: bfloat16 is several times slower there."""
    implementation: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers of the trainer. transformer_engine: NVIDIA's kernels, for bfloat16 on GPUs, and the only ones with FP8;
    local: Megatron's own linears and our packed attention; auto: the first where it is installed and can be used."""


class PrecisionConfig(Section):
    """FP8 inside the layers, through Transformer Engine: see docs/precision.md. The embedding, the output layer,
    log-probs and the loss never are FP8."""

    fp8: Literal["off", "hybrid", "e4m3"] = "off"
    """Format of the operands of the layers' matrix products. hybrid: e4m3 forward, e5m2 for gradients; e4m3: e4m3 for
    both. Needs model.dtype = "bfloat16"."""
    recipe: Literal["tensorwise", "delayed", "blockwise", "mxfp8"] = "tensorwise"
    """Source of the scales. tensorwise: each tensor's own largest value; delayed: those of the last 1024 passes;
    blockwise: blocks of 128 values; mxfp8: blocks of 32 values, on Blackwell."""
    fp8_params: bool = False
    """Keep the layers' matrices in FP8 instead of quantising bfloat16 ones each update; the optimizer's float32 weights
    stay. Needs optimizer.distributed."""
    bf16_layers_at_start: int = Field(0, ge=0)
    """Layers at the start of the model that stay bfloat16 (not with delayed)."""
    bf16_layers_at_end: int = Field(0, ge=0)
    """Layers at the end of the model that stay bfloat16 (not with delayed)."""

    @property
    def uses_fp8(self) -> bool:
        """Whether any matrix product is FP8."""
        return self.fp8 != "off"


class DataConfig(Section):
    """The source of prompts."""

    source: Literal["chains", "programs", "reasoning_gym", "jsonl"] = "chains"
    """chains: the demo's modular arithmetic; programs: small functions to be found from examples; reasoning_gym: a
    procedural data set; jsonl: your own file."""
    path: str | None = None
    """jsonl: the file, one object a line with the fields `prompt` and `answer`; or a Parquet file (.parquet)."""
    format: Literal["plain", "math", "gsm8k", "humaneval"] = "plain"
    """jsonl: fields of the file. plain: `prompt` and `answer`; math: MATH-500 and AIME; gsm8k; humaneval: programs,
    judged by their tests. All but plain also say how to answer; see docs/evaluation.md."""
    dataset: str | None = None
    """reasoning_gym: name of the data set, such as "basic_arithmetic"."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the source: chains {min_terms, max_terms}, programs {num_examples}, reasoning_gym: the data set's own
    settings."""
    size: PositiveInt = 10_000
    """Number of prompts that a procedural source makes before it starts over in a new order."""
    chat_template: bool = False
    """Wrap each prompt in the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message for the chat template."""
    max_prompt_tokens: PositiveInt = 512
    """A longer prompt is an error, or skipped (see on_bad_prompt)."""
    on_bad_prompt: Literal["error", "skip"] = "error"
    """Treatment of an empty or over-long prompt. Skipped prompts are counted in the metrics."""


class RewardConfig(Section):
    """The judge of responses, and the shaping of its rewards."""

    kind: str = "auto"
    """auto: the verifier of the prompt source (math-verify for jsonl); or "chains", "reasoning_gym", "math"; code: runs
    the response's program against tests; or a function of your own, "my_package.my_module:my_function"."""
    timeout_s: PositiveFloat = 10.0
    """Deadline of one verification; a response that exceeds it is judged wrong and counted."""
    concurrency: PositiveInt | None = None
    """Verifications at once: processes of a plain function, calls of an async one.
    Unset: as many processes as cores, at most 8, or 64 calls."""
    process_memory_mib: PositiveInt = 4096
    """Data memory of one process that judges, in MiB; raise it for a judge that loads a model."""
    code_memory_mib: PositiveInt = 1024
    """code: address space of a program, in MiB."""
    overlong_penalty: float = Field(0.0, ge=0)
    """Subtracted from the reward of a truncated response, and linearly less of it over the last overlong_buffer_tokens
    before rollout.max_response_tokens (DAPO). Shapes advantages; the reward metrics show the verdict."""
    overlong_buffer_tokens: int = Field(0, ge=0)
    """Tokens before rollout.max_response_tokens over which overlong_penalty grows. 0: truncated responses only."""
    scale: PositiveFloat = 1.0
    """Factor of the shaped reward on its way to the advantages."""
    running_std: bool = False
    """Divide the shaped rewards by the standard deviation of all rewards so far, this batch included (the reward
    scaling of PPO implementations, without a mean)."""
    clip: PositiveFloat | None = None
    """Bound the scaled reward to [-clip, clip], after scale and running_std. Unset: no bound."""

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        return REWARD.known(kind)


class RolloutConfig(Section):
    """Sampling responses, in budgeted pieces (partial rollout)."""

    engine: str = "embedded"
    """embedded: our small torch engine in a process of its own; sglang: SGLang servers started on this machine, with or
    without GPUs; attach: running SGLang-compatible servers (urls); recorded: none, batches come from a recorded run; or
    an engine of your own, "my_package.my_module:my_engine" (an EngineKind)."""
    record: bool = False
    """Keep every step's judged groups in the run's `rollouts` folder, for `recorded` and for study."""
    recorded_from: str | None = None
    """recorded: the `rollouts` folder of a run with record = true."""
    urls: tuple[str, ...] = ()
    """attach: base URLs of the servers, such as "http://127.0.0.1:30000"."""
    num_servers: PositiveInt = 1
    """embedded, sglang: how many servers to start."""
    server_tensor_parallel: PositiveInt = 1
    """sglang: ranks that each server splits the model over."""
    prompts_per_step: PositiveInt = 16
    """Groups trained in one step."""
    samples_per_prompt: PositiveInt = 8
    """Responses in a group."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; behaviour and current log-probs are both of the tempered distribution."""
    max_response_tokens: PositiveInt = 512
    """A response that reaches this length is finished (reason "length")."""
    truncated: Literal["keep", "mask"] = "keep"
    """keep: train on responses cut at max_response_tokens; mask: they count in the group's statistics only."""
    keep_group: str = "all"
    """Judged groups that take a place in the batch; the others are replaced. all; informative: those whose responses
    got different rewards, as the others teach nothing (DAPO's dynamic sampling); or a function of your own,
    "my_package.my_module:keep_group"."""
    tokens_per_round: PositiveInt | None = None
    """Partial rollout: tokens a response may grow per round before it is set aside and resumed with later weights.
    Unset: every response is sampled to its end at once."""
    groups_in_flight: PositiveInt | None = None
    """Groups being sampled at once; more than prompts_per_step lets slow ones wait for a later step.
    Unset: prompts_per_step."""
    abort_tail: bool = False
    """Over-sampling: once a step has its groups, abort the responses still being sampled; they keep their tokens and
    resume in the next step. Useful with groups_in_flight above prompts_per_step."""
    overlap: bool = False
    """Sample while the trainer trains; running responses continue with new weights after each push."""
    max_staleness: int | None = Field(None, ge=0)
    """Largest age of a token, in optimizer updates, in any update that trains it. Kept by admission: no response
    starts that might not be trained in time. Unset: no bound; overlap needs one."""
    max_concurrent_requests: PositiveInt = 256
    """Responses that a server samples at once; without overlap and abort_tail the others wait inside the server."""
    request_timeout_s: PositiveFloat = 300.0
    """Deadline of one generate request: of one round, without overlap and abort_tail."""
    max_retries: int = Field(2, ge=0)
    """Repetitions of a request after a failed or malformed reply, before its server is fenced off."""
    startup_timeout_s: PositiveFloat = 180.0
    """Deadline for a server to become healthy."""
    max_restarts: int = Field(3, ge=0)
    """embedded, sglang: restarts of each server that has ended or hangs, after growing delays. A server without
    restarts left stays away; the run goes on with the others."""
    hang_timeout_s: PositiveFloat = 600.0
    """embedded, sglang: a server that has not answered for this long is killed and started again. An SGLang server does
    not answer within a forward pass, or while it takes in a bucket of weights: keep this above sync.timeout_s."""
    router_url: str | None = None
    """attach: an sglang-router of yours in front of the servers in `urls`, such as "http://127.0.0.1:30001". Requests
    for tokens go through it, one by one; everything else goes to the servers themselves."""
    engine_threads: PositiveInt | None = None
    """embedded, sglang: CPU threads of one engine process. Unset: cores / processes (trainer and engine take turns)."""
    engine_max_context: PositiveInt | None = None
    """embedded, sglang: longest prompt + response. Unset: max_prompt_tokens + max_response_tokens."""

    @field_validator("engine")
    @classmethod
    def _is_known_engine(cls, engine: str) -> str:
        return ENGINE.known(engine)

    @property
    def engine_kind(self) -> EngineKind:
        """The capabilities of `engine`. Raises UserError for a bad dotted path."""
        return engine_kind(self.engine)

    @property
    def num_started(self) -> int:
        """Servers that the run starts itself."""
        return self.num_servers if self.engine_kind.specs else 0

    @property
    def num_server_gpus(self) -> int:
        """GPUs that these servers take."""
        return self.num_started * self.server_tensor_parallel if self.engine_kind.on_gpus else 0

    @field_validator("keep_group")
    @classmethod
    def _is_known_filter(cls, keep_group: str) -> str:
        return KEEP_GROUP.known(keep_group)


class OptimizerConfig(Section):
    """Adam, through Megatron-Core."""

    lr: PositiveFloat = 1e-6
    """Learning rate after warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: constant, or down to lr x min_lr_ratio at the last of total_updates."""
    warmup_updates: int = Field(0, ge=0)
    """Linear warm-up over this many optimizer updates."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """linear, cosine: where the learning rate ends, as a share of lr."""
    total_updates: PositiveInt | None = None
    """linear, cosine: the update at which the floor is reached; it stays there. Unset: train.num_steps x
    minibatches_per_step x epochs_per_step; set it where the run may be prolonged later."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay (AdamW), of matrices; norms and biases are left alone, as Megatron does it."""
    beta1: float = Field(0.9, gt=0, lt=1)
    """Decay of Adam's first moment."""
    beta2: float = Field(0.95, gt=0, lt=1)
    """Decay of Adam's second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of Adam's second moment."""
    clip_grad: PositiveFloat = 1.0
    """Largest global gradient norm."""
    max_skipped_in_a_row: PositiveInt = 20
    """An update whose gradient is not finite is skipped and counted; this many in a row end the run with an error. The
    same holds for the critic's updates."""
    distributed: bool = False
    """Split Adam's state (and the float32 copy of bfloat16 weights) over the data and context ranks, as Megatron's
    distributed optimizer does. The same update for less memory."""


FORWARDS_FIRST_MEMORY_SHARE = 0.1  # of a device: what train.schedule = "auto" lets the layer inputs of an update take


class TrainConfig(Section):
    """The length of the run, and the use of each rollout batch."""

    num_steps: PositiveInt = 100
    """Rollout batches to train on."""
    rollout_only: bool = False
    """Sample, judge and record without any update: to measure engines and rewards, or to make recordings."""
    minibatches_per_step: PositiveInt = 1
    """Optimizer updates per pass over a rollout batch: samples of later ones are older (staleness)."""
    epochs_per_step: PositiveInt = 1
    """Passes over each rollout batch (sample replay)."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Packed tokens in one forward pass of one rank; a longer single sequence gets a micro-batch of its own. With
    context parallelism a pack is shared by parallel.context ranks and holds that many times more."""
    logprob_chunk_tokens: PositiveInt = 256
    """Rows whose logits exist at once when log-probs are computed."""
    logprob_backend: Literal["auto", "torch", "triton"] = "auto"
    """Implementation of log-probs. triton: one kernel reads a chunk of logits once instead of several times, and
    needs a GPU; auto: torch, until triton has been measured to be faster (benchmarks/logprobs.py)."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus in the loss."""
    recompute: bool = False
    """Recompute all activations in the backward pass."""
    schedule: Literal["auto", "forwards_first", "interleaved"] = "auto"
    """The order of passes with scope exact: forwards_first runs all forward passes of an update, whose log-probs
    give the bounds, before its backward passes, and keeps all activations in between; interleaved scores in a pass of
    its own. auto: the first with one micro-batch, or with recompute while layer inputs take under a tenth of memory."""


class SyncConfig(Section):
    """Weight sync from trainer to engines."""

    channel: Literal["broadcast", "disk"] = "broadcast"
    """broadcast: over one process group with all engines; disk: through files that every engine can read."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """broadcast: auto is NCCL where the trainer has a GPU and the engines are SGLang's, gloo otherwise."""
    bucket_mib: PositiveFloat = 64.0
    """broadcast: weights gathered and sent at once. Two buckets are held: one on its way, one being gathered."""
    timeout_s: PositiveFloat = 120.0
    """Deadline of each stage of a weight update; an engine that misses it is fenced off."""


class EvalConfig(Section):
    """Evaluation of the current weights inside the run, on prompts of its own."""

    interval_steps: PositiveInt | None = None
    """Evaluate before the first step, after every so many, and after the last. Unset: never."""
    path: str | None = None
    """jsonl: the file with the prompts to evaluate. Other sources draw them with a seed of their own."""
    num_prompts: PositiveInt = 64
    """Prompts, the same in each evaluation."""
    samples_per_prompt: PositiveInt = 1
    """Responses to each prompt."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature of the evaluation."""


class CheckpointConfig(Section):
    """Saving and resuming."""

    interval_steps: PositiveInt | None = 20
    """Save after every so many steps, and after the last. Unset: never."""
    keep_last: PositiveInt = 2
    """Checkpoints kept; older ones are deleted after a newer one is complete."""
    asynchronous: bool = False
    """Copy weights and optimizer state to CPU memory (12 bytes a parameter, divided among the ranks; kept for the next
    save) and write them while training goes on; the checkpoint counts from the next step boundary at which all ranks
    have written."""
    timeout_s: PositiveFloat = 1800.0
    """Deadline of one rank to write one checkpoint; past it, the run ends with an error."""


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
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    loss: AnyLoss = Field(default_factory=BapoLoss)
    bapo: ClipBoundConfig = Field(default_factory=ClipBoundConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
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
    def searches_bounds(self) -> bool:
        """Whether the clip bounds of an update come from a search."""
        return self.loss.bounds == "bapo" and self.bapo.scope != "fixed"
