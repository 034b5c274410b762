"""A model's weights in the form that engines get. Implements `sync.base.WeightSource`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.core.fp8_utils import is_float8tensor
from torch import Tensor
from torch.nn import ModuleList, Parameter

from bapo_megatron.checkpoint.shards import Piece
from bapo_megatron.engines.wire import TensorSpec
from bapo_megatron.hf.shape import ModelShape, hf_tensors
from bapo_megatron.learner.exchange import gather_weights, own_pieces
from bapo_megatron.learner.parallel import ParallelLayout

ReadParameter = Callable[[Parameter], Tensor]
"""Returns what stands for a parameter, in its shape. May be collective over the ranks that hold copies of it."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The parameters as they are, or as read by a source that wraps this one."""

    model: ModuleList  # this rank's chunks
    shape: ModelShape
    layout: ParallelLayout
    version: int

    def manifest(self) -> list[TensorSpec]:
        """See `WeightSource.manifest`."""
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return [TensorSpec(name, dtype, size) for name, size in hf_tensors(self.shape).items()]

    def pieces(self, read: ReadParameter = Parameter.detach) -> Iterator[Piece]:
        """See `WeightSource.pieces` and `own_pieces`."""
        return own_pieces(self.model, self.shape, self.layout, read)

    def whole(self, read: ReadParameter = Parameter.detach) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource.whole` and `gather_weights`."""
        return gather_weights(self.model, self.shape, self.layout, read)


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A source that reads each parameter of a model in another way."""

    inner: ModelWeights
    read: ReadParameter

    @property
    def version(self) -> int:
        return self.inner.version

    def manifest(self) -> list[TensorSpec]:
        """See `WeightSource.manifest`."""
        return self.inner.manifest()

    def pieces(self) -> Iterator[Piece]:
        """See `WeightSource.pieces`."""
        return self.inner.pieces(self.read)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """See `WeightSource.whole`."""
        return self.inner.whole(self.read)


@dataclass(frozen=True, slots=True)
class Unquantised:
    """Reads Adam's weight, rounded, in place of an FP8 parameter."""

    main_weight: ReadParameter  # reads an FP8 parameter's float32 weight

    def __call__(self, parameter: Parameter) -> Tensor:
        if is_float8tensor(parameter) and parameter.requires_grad:  # its `dtype` reads bfloat16
            return self.main_weight(parameter).to(parameter.dtype)
        return parameter.detach()
