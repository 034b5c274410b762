"""Exchange of weights between a Hugging Face folder and the tensor- and pipeline-parallel parts of a Megatron model."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, ModuleList, Parameter

from bapo_megatron.checkpoint.folder import WEIGHT
from bapo_megatron.checkpoint.shards import Piece
from bapo_megatron.config.schema import AHEAD_BYTES
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.families import EMBEDDING, OUTPUT, VALUE_HEAD
from bapo_megatron.hf.reader import HFReader
from bapo_megatron.hf.shape import ModelShape, entries
from bapo_megatron.hf.splits import Entry, Size, is_any, is_stored
from bapo_megatron.learner.parallel import AxisRanks, ParallelLayout, device
from bapo_megatron.learner.slicing import Slicer, canonical, from_shards, place_shard, to_shard
from bapo_megatron.runtime.together import failing_together


def parameters_by_global_name(chunks: Iterable[Module]) -> dict[str, Parameter]:
    """Return this rank's parameters by the names of `hf.shape.entries`, which number layers and experts within the
    whole model. The names are the same for Transformer Engine's layers."""
    named = {}
    for chunk in chunks:
        layers = chunk.decoder.layers  # type: ignore[union-attr]
        first = layers[0].layer_number - 1 if len(layers) else 0  # type: ignore[arg-type, index, union-attr]
        for name, parameter in chunk.named_parameters():
            if name.startswith("decoder.layers."):
                _, _, local, rest = name.split(".", 3)
                experts = getattr(getattr(layers[int(local)], "mlp", None), "local_expert_indices", None)  # type: ignore[index]
                name = f"decoder.layers.{int(local) + first}.{canonical(rest, experts)}"
            named[name] = parameter
    return named


def take_held(parameters: dict[str, Parameter], entry: Entry, shape: ModelShape) -> list[Parameter]:
    """Take an entry out of `parameters`: nothing on ranks without it, two where a tied embedding has a copy."""
    names = [entry.megatron_name]
    if entry.megatron_name == EMBEDDING.name and shape.tied_embeddings:
        names.append(OUTPUT.name)  # the last stage's copy
    return [parameters.pop(name) for name in names if name in parameters]


def placed_entries(shape: ModelShape, layout: ParallelLayout) -> Iterator[tuple[Entry, AxisRanks]]:
    """Iterate over the entries of a model, each with the ranks that hold it."""
    for entry in entries(shape):
        placed = entry if entry.axis in layout.axes else entry.without_experts()
        yield placed, layout.axes[placed.axis]


@torch.no_grad()
def load_weights(
    model: ModuleList,
    shape: ModelShape,
    layout: ParallelLayout,
    path: Path,
    fill: Callable[[Parameter, Tensor], object] = Parameter.copy_,
    *,
    stored: ModelShape | None = None,
) -> None:
    """Fill this rank's parameters from a Hugging Face folder, reading only the slices they need. Collective.

    Args:
        model: this rank's chunks of the model.
        shape: the shape of the model in the folder; if it has no value head, a critic's stays as it is.
        fill: puts a tensor into a parameter.
        stored: the shape of the model in the folder, if only the first rows of its vocabulary are read.

    Raises:
        CheckpointError: names or shapes of the tensors do not fit config.json (lists them), or a tensor holds nan or
            infinity; raised on every rank, even if only one rank reads the fault.
    """
    with failing_together(CheckpointError), HFReader(path) as read:
        read.check(stored or shape)
        fill_parameters(model, shape, layout, read, fill, are_read=is_stored)


@torch.no_grad()
def fill_parameters(
    model: ModuleList,
    shape: ModelShape,
    layout: ParallelLayout,
    read: Slicer,
    fill: Callable[[Parameter, Tensor], object],
    are_read: Callable[[Entry], bool] = is_any,
) -> None:
    """Call `fill` with each of this rank's parameters and its shard, read slice by slice. Not collective.

    Args:
        are_read: whether `read` has a parameter; the others stay as they are.
    """
    parameters = parameters_by_global_name(model)
    for entry, axis in placed_entries(shape, layout):
        if (targets := take_held(parameters, entry, shape)) and are_read(entry):
            shard = to_shard(entry, read, axis.rank, axis.size)
            for target in targets:
                assert target.shape == shard.shape, f"{entry.megatron_name}: {target.shape} != {shard.shape}"
                fill(target, shard)
    unknown = sorted(parameters.keys() - {VALUE_HEAD.name})
    assert not unknown, f"the name map does not know {unknown}"


@torch.no_grad()
def gather_weights(
    model: ModuleList,
    shape: ModelShape,
    layout: ParallelLayout,
    tensor_of: Callable[[Parameter], Tensor] = Parameter.detach,
    are_gathered: Callable[[Entry], bool] = is_stored,
) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors by Hugging Face name, one by one, on global rank 0; an empty tensor on every other rank.

    For each parameter, the first set of ranks that split it on its pipeline stage gather the shards (the only holder
    of an expert sends it to the first of them), and the first of them sends the whole to rank 0: see `_ToRankZero`.
    Collective: every rank must exhaust the iterator. Tied embeddings come once, as model.embed_tokens.weight. A tensor
    may alias the live weight: use it before the next update, or copy it.

    Args:
        model: this rank's chunks of the model.
        tensor_of: maps a parameter to the tensor to gather, of the parameter's shape, e.g. its gradient. All ranks that
            hold the parameter call it in the same order: it may be collective over data ranks.
        are_gathered: whether a parameter is gathered.

    Raises:
        UserError: `tensor_of` failed on a rank, which is named; raised on every rank, at the end.
    """
    parameters = parameters_by_global_name(model)
    read = _SharedReader(tensor_of)
    gathered = [placed for placed in placed_entries(shape, layout) if are_gathered(placed[0])]
    mine = (parameters[entry.megatron_name] for entry, _ in gathered if entry.megatron_name in parameters)
    if (first := next(mine, None)) is not None:
        read.dtype = read(first).dtype
    led = ((e.hf_shapes, _stage(e, shape, layout)) for e, axis in gathered if axis.is_first)
    coming = ((sizes, stage) for sizes, stage in led if layout.pipeline_rank == 0 < stage)
    to_rank_zero = _ToRankZero(layout, read.dtype, coming)
    for entry, axis in gathered:
        to_rank_zero.ask()
        stage, holder = _stage(entry, shape, layout), entry.holder(axis.size)
        is_mine = layout.pipeline_rank == stage and holder in (None, axis.rank)
        shard = read(parameters[entry.megatron_name]) if is_mine else None
        tensors: list[Tensor] = []
        if layout.pipeline_rank == stage and axis.is_first_copy:
            tensors = _joined(entry, axis, shard, read.dtype)
        if stage > 0 and axis.is_first:
            if layout.pipeline_rank == stage:
                to_rank_zero.send(tensors)
            elif layout.pipeline_rank == 0:
                tensors = to_rank_zero.next()
        for i, name in enumerate(entry.hf_names):
            yield name, tensors[i] if layout.rank == 0 else torch.empty(0)
    to_rank_zero.end()
    read.end()


class _ToRankZero:
    """Tensors of later stages on their way to rank 0, in the order of the entries.

    Rank 0 asks for them ahead, and the first rank of a stage sends without waiting: they travel while rank 0 reads its
    own parameters and sends buckets to the engines. Each side holds `AHEAD_BYTES` of them, and one parameter more.
    """

    def __init__(
        self, layout: ParallelLayout, dtype: torch.dtype | None, coming: Iterator[tuple[tuple[Size, ...], int]]
    ) -> None:
        """`coming`: on rank 0, sizes and stage of each parameter that a later stage holds; elsewhere nothing."""
        self._layout, self._dtype, self._coming = layout, dtype, coming
        self._under_way: deque[tuple[list[Tensor], list[dist.Work]]] = deque()
        self._num_bytes = 0

    def ask(self) -> None:
        """Ask for tensors until enough are on their way."""
        while self._num_bytes < AHEAD_BYTES and (first := next(self._coming, None)):
            sizes, stage = first
            tensors = [torch.empty(size, dtype=self._dtype, device=device()) for size in sizes]
            self._begin(tensors, partial(dist.irecv, src=self._layout.pipeline_group_rank(stage)))

    def send(self, tensors: list[Tensor]) -> None:
        """Send tensors; wait for the earliest if many are on their way."""
        tensors = [tensor.contiguous() for tensor in tensors]
        self._begin(tensors, partial(dist.isend, dst=self._layout.pipeline_group_rank(0)))
        while self._num_bytes > AHEAD_BYTES:
            self.next()

    def next(self) -> list[Tensor]:
        """Wait for the earliest tensors on their way, and return them."""
        tensors, works = self._under_way.popleft()
        for work in works:
            work.wait()
        self._num_bytes -= sum(tensor.nbytes for tensor in tensors)
        return tensors

    def end(self) -> None:
        """Wait for all that is on its way."""
        while self._under_way:
            self.next()

    def _begin(self, tensors: list[Tensor], travel: Callable[..., dist.Work | None]) -> None:
        works = [travel(tensor, group=self._layout.pipeline_group) for tensor in tensors]
        self._under_way.append((tensors, [work for work in works if work is not None]))
        self._num_bytes += sum(tensor.nbytes for tensor in tensors)


def _joined(entry: Entry, axis: AxisRanks, shard: Tensor | None, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the whole tensors of a parameter on the first rank of its axis; on others, perhaps none.

    Args:
        shard: this rank's; None if another rank is the only one with this expert.
    """
    holder = entry.holder(axis.size)
    if holder is None:
        assert shard is not None
        shards = [shard]
        if axis.size > 1:
            shard = shard.contiguous()
            shards = [torch.empty_like(shard) for _ in range(axis.size)]
            dist.all_gather(shards, shard, group=axis.group)
        return from_shards(entry, shards)
    if shard is not None and holder > 0:
        dist.send(shard.contiguous(), dst=dist.get_global_rank(axis.group, 0), group=axis.group)
        return []
    if axis.rank == 0 and holder > 0:
        shard = torch.empty(entry.shard(holder, axis.size).shape, dtype=dtype, device=device())
        dist.recv(shard, src=dist.get_global_rank(axis.group, holder), group=axis.group)
    return [] if shard is None else from_shards(entry.without_experts(), [shard])


@torch.no_grad()
def own_pieces(
    model: ModuleList,
    shape: ModelShape,
    layout: ParallelLayout,
    tensor_of: Callable[[Parameter], Tensor] = Parameter.detach,
) -> Iterator[Piece]:
    """Yield this rank's boxes of the tensors of `gather_weights`; all ranks' boxes together make up each tensor once.

    Ranks that hold the same part of a model take turns, parameter by parameter. Collective, and tensors may alias
    weights, as with `gather_weights`.

    Raises:
        UserError: `tensor_of` failed on a rank, which is named; raised on every rank, at the end.
    """
    parameters = parameters_by_global_name(model)
    read = _SharedReader(tensor_of)
    for number, (entry, axis) in enumerate(placed_entries(shape, layout)):
        if entry.stored and (parameter := parameters.get(entry.megatron_name)) is not None:
            shard = read(parameter)
            if number % axis.copies.size() == axis.copies.rank():
                yield from place_shard(entry, WEIGHT, shard, axis.rank, axis.size)
    read.end()


class _SharedReader:
    """A reader of parameters on all ranks. A rank on which it fails still takes part in the collectives to the end."""

    def __init__(self, tensor_of: Callable[[Parameter], Tensor]) -> None:
        self.dtype: torch.dtype | None = None  # zeros for what cannot be read have it; None means the parameter's dtype
        self._tensor_of = tensor_of
        self._failures: list[Exception] = []

    def __call__(self, parameter: Parameter) -> Tensor:
        try:
            return self._tensor_of(parameter)
        except Exception as problem:
            self._failures.append(problem)
            return torch.zeros(parameter.shape, dtype=self.dtype or parameter.dtype, device=parameter.device)

    def end(self) -> None:
        """Raise the first rank's first failure on every rank, as a UserError. Collective over all ranks."""
        with failing_together():
            if self._failures:
                raise self._failures[0]


def _stage(entry: Entry, shape: ModelShape, layout: ParallelLayout) -> int:
    """Return the pipeline stage that holds a parameter."""
    if entry.layer is not None:
        return layout.stage_of_layer(entry.layer, shape.num_layers)
    return 0 if entry.megatron_name == EMBEDDING.name else layout.pipeline_size - 1
