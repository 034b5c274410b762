"""Operations that have a faster version on CPUs; the results equal torch's, up to rounding.

Start at `kernels_of`, the only place that chooses. `base.py` has torch's own operations, and `cpu.py` the versions for
CPUs. `delta_rule.py` is one rule for any device, which learner and embedded engine share.
"""

from torch import Tensor

from bapo_megatron.kernels.base import Kernels
from bapo_megatron.kernels.cpu import CPUKernels

_PLAIN, _CPU = Kernels(), CPUKernels()


def kernels_of(x: Tensor) -> Kernels:
    """Return the kernels for the device that holds x."""
    return _CPU if x.device.type == "cpu" else _PLAIN
