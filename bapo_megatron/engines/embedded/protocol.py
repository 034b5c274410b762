"""Bodies of the HTTP requests, as SGLang 0.5.23 names their fields. Unknown or unsupported fields are refused."""

from typing import Annotated, Literal, Self

from pydantic import Discriminator, Field, StrictInt, Tag, field_validator, model_validator

from bapo_megatron.engines.base import ALL_MEMORY, Memory, PauseMode
from bapo_megatron.runtime.bodies import RequestBody

MAX_SEQUENCES = 4096  # per request: prompts x n
MAX_GROUP_SIZE = 1 << 16
PromptIds = Annotated[list[StrictInt], Field(min_length=1, fail_fast=True)]
PromptBatch = Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_SEQUENCES, fail_fast=True)]


def _one_or_batch(value: object) -> str:
    """Return which member of a union a value is meant to be, so that an error names only that member."""
    is_batch = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    return "batch" if is_batch else "prompt"


def _one_or_list(value: object) -> str:
    return "list" if isinstance(value, list) else "dict"


class SamplingParams(RequestBody):
    """Sampling parameters of one response. `stop` strings need a tokenizer, which this engine does not have."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, lt=2**31)
    min_p: float = Field(default=0.0, ge=0, le=1)
    max_new_tokens: int = Field(default=128, ge=0)  # 0 scores the prompt
    stop: None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1, le=1024)
    sampling_seed: int | None = Field(default=None, ge=0, lt=2**63)

    @field_validator("top_k")
    @classmethod
    def _top_k_is_a_count(cls, value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError("must be -1 (all tokens) or at least 1")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _no_stop_strings(cls, value: object) -> None:
        if value:
            raise ValueError("stop strings need a tokenizer; send stop_token_ids")

    @property
    def truncates(self) -> bool:
        return self.top_k != -1 or self.top_p < 1 or self.min_p > 0


class GenerateBody(RequestBody):
    """Prompts as token ids, or, for a server with a tokenizer, as text."""

    input_ids: (
        Annotated[
            Annotated[PromptIds, Tag("prompt")] | Annotated[PromptBatch, Tag("batch")], Discriminator(_one_or_batch)
        ]
        | None
    ) = None
    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_SEQUENCES)] | None = None
    sampling_params: Annotated[
        Annotated[SamplingParams, Tag("dict")]
        | Annotated[list[SamplingParams], Field(max_length=MAX_SEQUENCES, fail_fast=True), Tag("list")],
        Discriminator(_one_or_list),
    ] = SamplingParams()
    rid: str | list[str] | None = None
    return_logprob: bool = False
    return_sampling_mask: bool = False  # return log-probs under the cut distribution; SGLang adds its tokens
    logprob_start_len: int | None = Field(default=None, ge=-1)  # for a single prompt, with max_new_tokens=0
    top_logprobs_num: int | None = Field(default=None, ge=0)
    stream: Literal[False] = False
    return_rows: tuple[str, ...] = ()  # the model's streams, by name; SGLang has none
    num_fed: StrictInt | list[StrictInt] = 1  # per prompt: leading tokens whose rows of fed streams are not wanted

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.input_ids is None) == (self.text is None):
            raise ValueError("send either input_ids or text")
        return self

    @property
    def to_score(self) -> tuple[list[int], int, int] | None:
        """The prompt to score, the position before the first scored token, and the number of likeliest tokens."""
        if self.logprob_start_len in (None, -1):
            return None
        assert self.logprob_start_len is not None
        prompt = [i for i in self.input_ids or () if isinstance(i, int)]
        return prompt, self.logprob_start_len, self.top_logprobs_num or 0

    @model_validator(mode="after")
    def _scores_or_samples(self) -> Self:
        params = self.sampling_params if isinstance(self.sampling_params, list) else [self.sampling_params]
        if any((p.max_new_tokens == 0) != (self.to_score is not None) for p in params):
            raise ValueError("max_new_tokens=0 and a logprob_start_len go together")
        if self.top_logprobs_num and not self.return_logprob:
            raise ValueError("top_logprobs_num needs return_logprob")
        if self.to_score is not None and not (self.to_score[0] and self.return_logprob):
            raise ValueError("logprob_start_len needs the input_ids of one prompt, and return_logprob")
        return self


class AbortBody(RequestBody):
    rid: str = ""
    abort_all: bool = False


class ProfileBody(RequestBody):
    """/start_profile, without SGLang's choice of activities."""

    output_dir: str = Field(min_length=1)
    with_stack: Literal[False] = False


class PauseBody(RequestBody):
    mode: PauseMode = "abort"


class EmptyBody(RequestBody):
    pass


class MemoryBody(RequestBody):
    """/release_memory_occupation and /resume_memory_occupation; without tags, for everything."""

    tags: list[Memory] | None = None

    @property
    def memory(self) -> frozenset[Memory]:
        return frozenset(self.tags or ALL_MEMORY)


class InitGroupBody(RequestBody):
    master_address: str
    master_port: int = Field(gt=0, lt=65536)
    rank_offset: int = Field(ge=1, le=MAX_GROUP_SIZE)
    world_size: int = Field(ge=2, le=MAX_GROUP_SIZE)
    group_name: str = Field(default="weight_update_group", min_length=1)
    backend: Literal["gloo", "nccl"] = "nccl"


class UpdateWeightsBody(RequestBody):
    names: Annotated[list[str], Field(min_length=1)]
    dtypes: list[str]
    shapes: list[list[Annotated[int, Field(ge=0)]]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None


class UpdateFromDiskBody(RequestBody):
    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class DestroyGroupBody(RequestBody):
    group_name: str = "weight_update_group"


class WeightsCheckerBody(RequestBody):
    """checksum: as SGLang; manifest: names, types and shapes of the weights, which SGLang does not report."""

    action: Literal["checksum", "manifest"]
