"""Operations that CPUs compute in ways of their own, to be fast; the results are those of torch, to rounding.

`kernels_of` is the only place that chooses. `base.py` has what torch does by itself, `cpu.py` what CPUs do instead.
"""

from torch import Tensor

from bapo_megatron.kernels.base import Kernels
from bapo_megatron.kernels.cpu import CPUKernels

_PLAIN, _CPU = Kernels(), CPUKernels()


def kernels_of(x: Tensor) -> Kernels:
    """Return the kernels for the device that holds x."""
    return _CPU if x.device.type == "cpu" else _PLAIN
