"""The copies in the machine's memory that stand for a model's storages while these are empty."""

import torch
from torch import Tensor, UntypedStorage


class HostCopies:
    """The copies of a model's empty storages. `learner/offload.py` adds and removes them."""

    def __init__(self) -> None:
        self._places: dict[int, Tensor] = {}  # bytes, by the address of a storage's object

    def __bool__(self) -> bool:
        """Whether a storage is empty."""
        return bool(self._places)

    def add(self, storage: UntypedStorage, place: Tensor) -> None:
        """Note that `place`, uint8, holds the bytes of a storage that is now empty."""
        self._places[storage._cdata] = place

    def remove(self, storage: UntypedStorage) -> None:
        del self._places[storage._cdata]

    def at(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or the same view of its storage's copy."""
        place = self._places.get(tensor.untyped_storage()._cdata)
        if place is None:
            return tensor
        offset = place.storage_offset() // tensor.itemsize + tensor.storage_offset()
        return tensor.new_empty(0, device="cpu").set_(place.untyped_storage(), offset, tensor.shape, tensor.stride())

    def device(self, tensor: Tensor) -> torch.device:
        """Return the device that the values of a model with this tensor are on."""
        return torch.device("cpu") if self else tensor.device
