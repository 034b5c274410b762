"""Memory of one trainer rank, by part, for this code: Megatron's local layers, `learner/attention.py` and
`algorithms/logprobs.py`. Activations are the tensors that autograd saves; tests compare them with measured peaks.

A step's peak is the largest of its three phases: forward and backward, update, weight sync.

Shape legend: T packed tokens of this rank, U in the whole pack (T x context), H hidden, F feed-forward of this rank,
    V vocabulary rows of this rank, Q and K query and key-value heads of this rank x head dimension D, C rows of a chunk
"""

import bisect
from dataclasses import dataclass

from bapo_megatron.algorithms.chunks import chunk_rows
from bapo_megatron.config.schema import AHEAD_BYTES, MAX_KEYS_PER_TOKEN, Config
from bapo_megatron.hf.shape import RULE_CHUNK, Experts, LayerShape, LinearAttention, runs
from bapo_megatron.hf.splits import is_kept, is_stored, is_trained
from bapo_megatron.hf.streams import routes
from bapo_megatron.learner.precision import FUSED_ACTIVATIONS
from bapo_megatron.machine.gpus import GIB
from bapo_megatron.machine.parameters import (
    Held,
    largest_adapted,
    largest_in_layer,
    largest_parameter,
    largest_tensor,
    model_parameters,
    rank_parameters,
)
from bapo_megatron.resolved import Resolved
from bapo_megatron.rollout.staleness import StalenessBound

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
MASTER_BYTES = 4  # gradients, Adam's moments and the master copy of bfloat16 weights are float32
BATCH_BYTES = 64  # token and position ids, rows, targets, advantages, log-probs, versions of one token: MicroBatch
LIKELY_BYTES = 8  # the id and log-prob of a likely token of a teacher or the sampler
CLASS_COPIES = 8  # log-probs of a row's likely tokens, probabilities and gradients, while the loss is differentiated

CONTEXT_BYTES = int(2.4 * GIB)  # what one H200 held outside of torch's allocator, with experts: docs/measured/gpu.toml
NCCL_BYTES = int(1.0 * GIB)  # assumed: NCCL's buffers for the groups of one rank
UNEVEN_LOAD = 0.25  # assumed: rows that a rank's experts get beyond an even share; routers decide, so it has no bound
ROUTER_BYTES = 6  # per token and expert: float32 probabilities, and masks of the choice
CHOICE_BYTES = 32  # per token and chosen expert: its number and its place, twice
MERGING_BYTES = 3 * MASTER_BYTES  # per value of a weight: it, alpha / rank * B A and their sum, or B A, in float32
FP8_BYTES = 2  # per weight: Transformer Engine keeps its FP8 value and, on Hopper, a transposed copy

# layers of the checkpoint that share a linear layer here
ATTENTION_IN, ATTENTION_OUT = ("q_proj", "k_proj", "v_proj"), ("o_proj",)
MLP_IN, MLP_OUT = ("gate_proj", "up_proj"), ("down_proj",)


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes on one rank. Example: TrainerMemory(stage=0, held=Held(1_000), trained=Held(1_000), weights=2_000, ...)."""

    stage: int
    held: Held
    trained: Held  # those with gradients: all, or the adapters
    # permanent
    weights: int
    gradients: int
    optimizer: int
    reference: int  # weights of the KL term's reference policy, or the adapters that it computes with
    teachers: int  # their weights
    critic: int  # its weights, gradients and optimizer
    fp8: int  # the layers' weights as FP8 operands
    batch: int
    context: int
    # forward and backward
    activations: int  # kept between forward and backward, for all micro-batches in progress
    working: int  # for the layer that is being differentiated, or for the rows before the output layer
    logits: int  # for one chunk of rows; 0 if a layer needs more
    # other phases
    update: int  # Adam's temporaries
    moved: int  # weights and state, the other models' too: in turns, they wait in the machine's memory
    frozen: int  # the part of `moved` that is never trained, so that its copies stay
    sync: int  # buckets, the full tensors gathered for them, and a weight to which its adapters are added

    @property
    def total(self) -> int:
        """The peak of a step."""
        always = self.weights + self.gradients + self.optimizer + self.reference + self.teachers + self.critic
        always += self.fp8 + self.batch + self.context
        return always + max(self.activations + self.working + self.logits, self.update, self.sync)

    @property
    def pushing(self) -> int:
        """The bytes on the GPU while a rank that takes turns with a server pushes weights."""
        return self.context + self.weights + self.sync


def trainer_memory(run: Resolved, *, stage: int = 0, gpu_bytes: int | None = None) -> TrainerMemory:
    """Estimate the memory of a stage's fullest rank.

    Args:
        gpu_bytes: memory of a GPU; None means a CPU, which has no CUDA context.
    """
    on_gpu = gpu_bytes is not None
    p, item = run.config.parallel, ITEM_BYTES[run.config.model.dtype]
    of_stage = p.stage_sizes(run.shape.num_layers)[stage]
    held, trained = rank_parameters(run.shape, p, stage), rank_parameters(run.shape, p, stage, is_trained)
    count, owned = held.total, trained.owned(run.config)
    of_model = rank_parameters(run.shape, p, stage, is_stored).total
    state = MASTER_BYTES * (2 if item == MASTER_BYTES else 3)  # float32 weights need no master copy
    reference = _of_reference(run, of_model, trained.total) * item
    teachers = sum(rank_parameters(shape, p, stage, is_stored).total for shape, _ in run.held_teachers) * item
    moved, frozen = count * item + owned * state, (count - trained.total) * item
    moved, frozen = moved + reference + teachers, frozen + reference + teachers
    critic = 0
    if not run.config.advantage.compares_responses:
        num_values = rank_parameters(run.critic_shape, p, stage).total
        of_critic = rank_parameters(run.critic_shape, p, stage, is_trained)
        kept = num_values * item + of_critic.owned(run.config) * state
        critic, moved = kept + of_critic.total * MASTER_BYTES, moved + kept
        frozen += (num_values - of_critic.total) * item
    layers = _Activations(run, gpu_bytes)
    # a parameter's gradient briefly exists outside the gradient buffer; without overlap, the vocabulary's does not
    largest = largest_parameter if p.overlap_communication else largest_in_layer
    working, logits = layers.backward() + largest(run.shape, p) * item, 0
    of_token = BATCH_BYTES + of_stage * routes_bytes(run) // run.shape.num_layers + _sampler_top_bytes(run)
    if stage == p.pipeline - 1:
        of_token += LIKELY_BYTES * run.config.teacher.top_k
    if stage == p.pipeline - 1 and layers.rows() + layers.logits() > working:
        working, logits = layers.rows(), layers.logits()
    return TrainerMemory(
        stage=stage,
        held=held,
        trained=trained,
        weights=count * item,
        gradients=trained.total * MASTER_BYTES,
        optimizer=owned * state,
        reference=reference,
        teachers=teachers,
        critic=critic,
        fp8=FP8_BYTES * of_model if run.config.precision.uses_fp8 and not run.config.precision.fp8_params else 0,
        batch=_tokens_of_update(run.config) * of_token,
        context=CONTEXT_BYTES + NCCL_BYTES if on_gpu else 0,
        activations=layers.kept(stage),
        working=working,
        logits=logits,
        update=owned * MASTER_BYTES if on_gpu else 2 * largest_parameter(run.shape, p) * MASTER_BYTES,
        moved=moved,
        frozen=frozen,
        sync=_sync(run, stage),
    )


def _of_reference(run: Resolved, of_model: int, of_adapters: int) -> int:
    """Count the parameters that a rank keeps for a reference: a second model's, or the adapters of lora.init_from."""
    if run.uses_own_reference:
        return of_adapters if run.config.lora.init_from is not None else 0
    return of_model if run.config.loss.kl_coef else 0


def fullest_rank(run: Resolved, gpu_bytes: int | None = None) -> TrainerMemory:
    """Return the memory of the rank that runs out first."""
    return max(rank_memories(run, gpu_bytes), key=lambda m: m.total)


def rank_memories(run: Resolved, gpu_bytes: int | None = None) -> list[TrainerMemory]:
    """Return the memory of the fullest rank of each stage."""
    return [trainer_memory(run, stage=s, gpu_bytes=gpu_bytes) for s in range(run.config.parallel.pipeline)]


def plans_forwards_first(run: Resolved, gpu_bytes: int | None) -> bool:
    """Return whether all forward passes of a full-length update come before its backward passes."""
    return forwards_under_way(run, gpu_bytes) == max_microbatches(run.config)


def forwards_under_way(run: Resolved, gpu_bytes: int | None) -> int:
    """Count the micro-batches that `auto` may run forward before the first backward pass.

    Shorter responses make fewer micro-batches, so any number up to this one occurs. On a CPU, whose memory is unknown
    here, the count is at most 1.
    """
    if not searches_exactly(run.config):
        return 0
    hidden = microbatch_tokens(run.config) * run.shape.hidden_size * ITEM_BYTES[run.config.model.dtype]
    if run.config.parallel.sequence:
        hidden //= run.config.parallel.tensor
    each = run.shape.num_layers * hidden

    def is_too_many(count: int) -> bool:
        stages = run.config.parallel.pipeline
        return not run.config.train.forwards_first(
            count, num_stages=stages, layer_input_bytes=count * each, memory_bytes=gpu_bytes
        )

    return bisect.bisect_left(range(1, max_microbatches(run.config) + 1), True, key=is_too_many)


def max_microbatches(config: Config) -> int:
    """Count the micro-batches of one update on one data rank if every prompt and response is as long as allowed."""
    r = config.rollout
    per_minibatch = r.prompts_per_step * r.samples_per_prompt // config.train.minibatches_per_step
    per_rank = -(-per_minibatch // config.parallel.data)
    longest = config.longest_trained
    budget = config.train.max_tokens_per_microbatch * config.parallel.context
    per_microbatch = max(1, budget // longest)
    return -(-per_rank // per_microbatch)


def planned_chunk_rows(run: Resolved, *, on_gpu: bool) -> int:
    """Return the rows of logits that exist together on a rank of the last stage."""
    tensor = run.config.parallel.tensor
    vocab_rows = run.shape.padded_vocab_size(tensor) // tensor
    return run.config.train.logprob_chunk_tokens or chunk_rows(vocab_rows, on_gpu=on_gpu)


def layers_per_chunk(run: Resolved) -> int:
    """Count the layers of the largest chunk."""
    return max(1, max(run.config.parallel.stage_sizes(run.shape.num_layers)) // run.config.parallel.virtual_pipeline)


def recomputed_layers(run: Resolved) -> int:
    """Count the layers of one chunk that are recomputed as a whole."""
    t = run.config.train
    if not t.recompute or t.recompute_modules:
        return 0
    layers = layers_per_chunk(run)
    return layers if t.recompute_layers is None else min(t.recompute_layers, layers)


def searches_exactly(config: Config) -> bool:
    """Return whether the update rule reads the update's own tokens before the update."""
    return config.rule_reads == "update"


def microbatch_tokens(config: Config) -> int:
    """Count one rank's tokens in the largest micro-batch; a sequence over the limit gets its own."""
    context = config.parallel.context
    longest = config.longest_trained
    per_rank = _sequences_per_rank(config) * longest
    return -(-min(max(config.train.max_tokens_per_microbatch * context, longest), per_rank) // context)


def _sequences_per_rank(config: Config) -> int:
    r = config.rollout
    per_update = -(-r.prompts_per_step * r.samples_per_prompt // config.train.minibatches_per_step)
    return -(-per_update // config.parallel.data)


def _tokens_of_update(config: Config) -> int:
    longest = config.longest_trained
    return -(-_sequences_per_rank(config) * longest // config.parallel.context)


def _sync(run: Resolved, stage: int) -> int:
    """Estimate a weight sync: a weight merged with its adapters, and on rank 0 two buckets, and a tensor gathered from
    its shards. With several stages, tensors on their way to rank 0."""
    if not run.engine.samples:
        return 0
    p, item = run.config.parallel, ITEM_BYTES[run.config.model.dtype]
    merging = largest_adapted(run.shape, p) * (MERGING_BYTES + item)
    largest = largest_tensor(run.shape) * item
    under_way = AHEAD_BYTES + largest if p.pipeline > 1 else 0
    if stage > 0:
        return merging + under_way
    bucket = max(int(run.config.sync.bucket_mib * 2**20), largest)
    gathered = 0 if p.tensor * p.pipeline * p.expert == 1 else 2 * largest
    return merging + 2 * bucket + gathered + under_way


class _Activations:
    """Bytes that autograd keeps for the layers of one rank."""

    def __init__(self, run: Resolved, gpu_bytes: int | None) -> None:
        p = run.config.parallel
        self._run, self._on_gpu = run, gpu_bytes is not None
        self._config, self._shape = run.config, run.shape
        self._forwards_first = forwards_under_way(run, gpu_bytes)
        self._item = ITEM_BYTES[run.config.model.dtype]
        self._T = microbatch_tokens(run.config)
        self._rows = -(-self._T // p.tensor) if p.sequence else self._T  # rows of hidden states between the linears
        self._H = run.shape.hidden_size
        self._Q = run.shape.num_heads * run.shape.head_dim // p.tensor
        self._K = run.shape.num_kv_heads * run.shape.head_dim // p.tensor
        self._V = run.shape.padded_vocab_size(p.tensor) // p.tensor
        each = layers_per_chunk(run)
        chunks = (run.shape.layers[first : first + each] for first in range(0, run.shape.num_layers, each))
        self._chunk = max(chunks, key=lambda chunk: sum(map(self.layer, chunk)))

    def kept(self, stage: int) -> int:
        """Count the bytes kept for all micro-batches between their forward and backward on a stage."""
        layers = self._kept_by_chunk()
        rows = self._T * self._H * self._item * (2 if self._config.parallel.sequence else 1)  # before the vocabulary
        rows += self._classes()
        by_turns = layers * self._chunks_under_way(stage) + self._shared()
        # minus the rows of the micro-batch being differentiated: they are in `rows()`, or freed
        forwards_first = self._forwards_first * (layers + self._shared() + rows) - rows
        return max(by_turns, forwards_first)

    def _kept_by_chunk(self) -> int:
        """Count the bytes that a chunk's layers keep for one micro-batch; recomputed layers keep only their inputs."""
        num_recomputed = recomputed_layers(self._run)
        inputs = num_recomputed * self._rows * self._H * self._item
        kept = runs(self._chunk[num_recomputed:])
        return inputs + sum(count * (self.layer(one) - self._recomputed_parts(one)) for one, count in kept)

    def _chunks_under_way(self, stage: int) -> int:
        """Count the chunks in progress in Megatron's 1F1B schedules: fewer on later stages."""
        p, num_microbatches = self._config.parallel, max_microbatches(self._config)
        if p.virtual_pipeline == 1:
            return min(p.pipeline - stage, num_microbatches)
        warmup = 2 * (p.pipeline - stage - 1) + (p.virtual_pipeline - 1) * p.pipeline
        return min(warmup + 1, num_microbatches * p.virtual_pipeline)

    def layer(self, layer: LayerShape) -> int:
        """Count the bytes of a layer for one micro-batch: two norms, attention, and the gated MLP."""
        hidden = self._rows * self._H * self._item
        norm = hidden + 4 * self._rows  # the input and 1 / rms
        if self._shape.norm_plus_one and self._item < MASTER_BYTES:
            norm += MASTER_BYTES * self._rows * self._H  # the input in float32
        attention = self._full_attention() if layer.linear is None else self._linear_attention(layer.linear)
        inputs = hidden * (self._keeps_input(ATTENTION_IN) + self._keeps_input(MLP_IN))
        return int(2 * norm + inputs + attention + self._mlp(layer))

    def _keeps_input(self, linear: tuple[str, ...]) -> bool:
        """Return whether a linear layer's input is kept: it has weights, or adapters, that are trained."""
        return self._shape.adapters is None or not {*linear}.isdisjoint(self._shape.adapters.targets)

    def _adapters(self, linear: tuple[str, ...], num_inputs: int, num_outputs: int) -> int:
        """Count the bytes that a linear layer's adapters keep: A x, and A and B of q, k and v as one matrix each, for
        instance; with sequence parallelism the whole input, of which the layer itself has a part."""
        if self._shape.adapters is None or not self._keeps_input(linear):
            return 0
        ranks = self._shape.adapters.rank * len({*linear} & {*self._shape.adapters.targets})
        is_row = linear in (ATTENTION_OUT, MLP_OUT)
        inner = self._rows if is_row else self._T
        gathered = 0 if is_row else (self._T - self._rows) * num_inputs
        return self._item * (ranks * (inner + num_inputs + num_outputs) + gathered)

    def _full_attention(self) -> float:
        """Count the bytes of attention to all earlier tokens, without its input."""
        per_token: float = self._item * self._Q * self._keeps_input(ATTENTION_OUT)
        if self._on_gpu:
            per_token += self._item * 4 * self._shape.head_dim  # cos and sin of q and k
        if self._shape.qk_norm:
            copies = self._Q + self._Q + 2 * self._K
            per_token += self._item * copies + 4 * (self._heads() + self._K // self._shape.head_dim)
        if self._shape.output_gate:
            per_token += (2 * self._item + MASTER_BYTES) * self._Q  # gate, gated output, and sigmoid in float32
        queries_keys_values = self._T * self._item * (self._Q + 2 * self._K)
        adapters = self._adapters(ATTENTION_IN, self._H, self._Q + 2 * self._K)
        adapters += self._adapters(ATTENTION_OUT, self._Q, self._H)
        return queries_keys_values + per_token * self._T + self._core_attention() + adapters

    def _linear_attention(self, linear: LinearAttention) -> float:
        """Count the bytes of linear attention without its input: the projections, what the convolution returns, the
        answers before and after their norm, and decays. On a CPU states between chunks; flash-linear-attention keeps
        normalised queries and keys, and a matrix for each chunk, instead."""
        tensor = self._config.parallel.tensor
        keys, values, heads = linear.keys // tensor, linear.values // tensor, linear.num_value_heads // tensor
        channels = linear.conv_channels // tensor
        widths = (channels + values + 2 * heads) + channels + 2 * values
        if self._on_gpu:
            rule: float = self._item * (2 * keys + RULE_CHUNK * heads)
        else:
            rule = MASTER_BYTES * heads * linear.key_dim * linear.value_dim / RULE_CHUNK
        return self._T * (self._item * widths + 4 * MASTER_BYTES * heads + rule)

    def _core_attention(self) -> float:
        """Count the bytes of attention besides queries, keys and values: output, log-sum-exp, gathered tensors."""
        context = self._config.parallel.context
        output = self._T * (self._item * self._Q + 4 * self._heads())
        if context == 1:
            if not self._run.shares_prompts:
                return output
            # a key of a prompt is there for each response, `MAX_KEYS_PER_TOKEN` times at most
            num_keys = self._T * min(MAX_KEYS_PER_TOKEN, self._config.rollout.samples_per_prompt)
            mask = 0 if self._on_gpu else self._T * min(self._config.longest_trained, self._T)
            return output + self._item * (num_keys * 2 * self._K + mask)
        # two chunks of queries, each with the gathered keys up to its end
        return output + self._T * self._item * 2 * self._K * (context - 0.5) + self._mask() * self._item

    def _heads(self) -> int:
        return self._Q // self._shape.head_dim

    def _mlp(self, layer: LayerShape) -> int:
        """Count the bytes of the gated MLP: fc1's output (2), the product if fc2 is trained; unfused also the active
        gate, up + 0."""
        if isinstance(layer.mlp, Experts):
            return self._experts(layer.mlp)
        is_fused = not self._on_gpu or self._shape.activation in FUSED_ACTIVATIONS
        copies, ffn = (2 if is_fused else 4) + self._keeps_input(MLP_OUT), self._F(layer)
        adapters = self._adapters(MLP_IN, self._H, 2 * ffn) + self._adapters(MLP_OUT, ffn, self._H)
        return copies * ffn * self._T * self._item + adapters

    def _experts(self, mlp: Experts) -> int:
        """Count the bytes of a mixture: for each row of an expert its input, fc1's output (2), the product, and that
        times the router's weight; for each token, the router's probabilities and choices. Of the shared expert fc1's
        output, the product, and fc2's output, which its gate multiplies."""
        of_rows = self._expert_rows(mlp) * self._item * (self._H + 4 * self._expert_size(mlp))
        if shared := mlp.shared_ffn_size // self._config.parallel.tensor:
            of_rows += self._item * (3 * shared * self._T + self._rows * self._H)
        return of_rows + self._rows * (ROUTER_BYTES * mlp.num_experts + CHOICE_BYTES * mlp.num_chosen)

    def _expert_rows(self, mlp: Experts) -> int:
        """Count the rows that a rank's experts compute: with uneven load, more than their share."""
        p = self._config.parallel
        rows = self._rows * mlp.num_chosen
        return int(rows * (1 + UNEVEN_LOAD)) if p.expert > 1 else rows * p.expert_tensor

    def _expert_size(self, mlp: Experts) -> int:
        return mlp.ffn_size // self._config.parallel.expert_tensor

    def _F(self, layer: LayerShape) -> int:
        return layer.mlp.active_rows // self._config.parallel.tensor

    def _recomputed_parts(self, layer: LayerShape) -> int:
        """Count the bytes of the parts of a layer that `train.recompute_modules` recomputes."""
        # linear attention has no core that Megatron knows
        attention = self._core_attention if layer.linear is None else lambda: 0.0
        parts = {"core_attn": attention, "mlp": lambda: self._mlp(layer)}
        chosen = self._config.train.recompute_modules if self._config.train.recompute else ()
        return int(sum(parts[name]() for name in chosen))

    def _mask(self) -> int:
        """Count mask entries of both query chunks, for a pack full of the longest sequences."""
        context = self._config.parallel.context
        longest = self._config.longest_trained
        pack = self._T * context
        length = min(longest, pack)
        entries_of_one = (length / (2 * context)) * length * (2 * context + 1) / (2 * context)
        return int(pack / length * entries_of_one)

    def _shared(self) -> int:
        """Count the bytes outside the layers: final norm, token and position indices, rotation, boolean masks."""
        context = self._config.parallel.context
        indices = 8 * self._T * (2 + 2 + 2 * (context + 0.5 if context > 1 else 1))
        hidden = self._rows * self._H * self._item
        # cos and sin for all layers
        rotation = 0 if self._on_gpu else 2 * self._shape.rotary_dim * self._T * self._item
        return int(2 * hidden + indices + rotation + (self._mask() if context > 1 else 0))

    def backward(self) -> int:
        """Count the extra bytes of differentiating a layer: MLP gradients and, if recomputed, its activations."""
        widest = max(self._chunk, key=self._F)
        gradients = 2 * self._rows * self._H * self._item
        if isinstance(mlp := widest.mlp, Experts):
            gradients += self._expert_rows(mlp) * self._item * (2 * self._H + 2 * self._expert_size(mlp))
        else:
            # the product's gradient takes the product's place, if that was kept
            gradients += self._T * self._item * (3 - self._keeps_input(MLP_OUT)) * self._F(widest)
        if self._config.parallel.sequence and self._shape.adapters is None:  # frozen weights do not read it
            gradients += 2 * self._T * self._H * self._item  # gathered input of a linear, and its gradient
        if recomputed_layers(self._run) == len(self._chunk):
            return gradients + max(map(self.layer, self._chunk))
        # layers that keep their activations are differentiated first, and have freed them
        return gradients + self._recomputed_parts(widest)

    def rows(self) -> int:
        """Count the bytes of the output layer's input and its gradient while log-probs are differentiated."""
        copies = self._item * (2 if self._config.parallel.sequence else 1) + MASTER_BYTES
        if self._config.class_top_k:
            copies += self._item  # the gradient by the divergence, or by what centers the score
        return self._T * self._H * copies + CLASS_COPIES * self._classes()

    def _classes(self) -> int:
        """Count the bytes of the log-probs of a teacher's or the sampler's likeliest tokens, and of all others."""
        top_k = self._config.class_top_k
        return self._T * (top_k + 1) * MASTER_BYTES if top_k else 0

    def logits(self) -> int:
        """Count the bytes of one chunk's logits, probabilities and low-precision copy."""
        chunk_tokens = planned_chunk_rows(self._run, on_gpu=self._on_gpu)
        is_low = self._item < MASTER_BYTES
        return min(chunk_tokens, self._T) * self._V * (2 * MASTER_BYTES + (self._item if is_low else 0))


def checkpoint_bytes(run: Resolved) -> int:
    """Return the bytes of one training checkpoint: float32 weights and two moments, also the critic's."""
    shapes = [run.shape] if run.config.advantage.compares_responses else [run.shape, run.critic_shape]
    num_values = sum(model_parameters(shape, is_kept) + 2 * model_parameters(shape, is_trained) for shape in shapes)
    return MASTER_BYTES * num_values


def host_bytes(run: Resolved) -> int:
    """Return the CPU memory on each node that trains, for copies of checkpoints; 0 if there are none.

    In turns, weights and state wait there, and checkpoints are written from them.
    """
    if run.config.takes_turns:
        p, on_node = run.config.parallel, max(1, run.placement.ranks_per_node)
        of_ranks = [one.moved for one in rank_memories(run) for _ in range(p.size // p.pipeline)]
        return max(sum(of_ranks[first : first + on_node]) for first in range(0, p.size, on_node))
    if not run.config.checkpoint.asynchronous or run.config.checkpoint.interval_steps is None:
        return 0
    return -(-checkpoint_bytes(run) // run.placement.trainer_nodes)


def routes_bytes(run: Resolved) -> int:
    """Return the bytes of one token's routes, of all layers; 0 without replay."""
    return routes(run.shape).row_bytes if run.config.model.replay_routes and run.shape.experts else 0


def _sampler_top_bytes(run: Resolved) -> int:
    """Return the bytes of the sampler's likeliest tokens of one token; 0 without score centering."""
    return LIKELY_BYTES * run.config.loss.sampler_top_k


def rows_host_bytes(run: Resolved) -> int:
    """Return the CPU memory of trainer rank 0 for what engines return with each token, routes and likeliest tokens, if
    all samples are as long as allowed.

    Untrained groups hold them, one step's more than are in flight or, with overlap, as many as the bound of staleness
    allows. The batch, or a checkpoint, repeats them.
    """
    r, t = run.config.rollout, run.config.train
    num_groups: float = (r.groups_in_flight or r.prompts_per_step) + r.prompts_per_step
    if r.overlap and r.max_staleness is not None:
        num_updates = t.minibatches_per_step * t.epochs_per_step
        num_groups = StalenessBound(r.max_staleness, num_updates, r.prompts_per_step).capacity(0, 0)
    of_sample = run.config.longest_trained * routes_bytes(run) + r.max_response_tokens * _sampler_top_bytes(run)
    return 2 * int(num_groups) * r.samples_per_prompt * of_sample
