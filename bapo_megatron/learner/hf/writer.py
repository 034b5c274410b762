"""Writing a stream of named tensors as a Hugging Face checkpoint, without holding all of it in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.learner.hf.reader import INDEX


def write_safetensors(named: Iterable[tuple[str, Tensor]], folder: Path, max_file_bytes: int = 2 << 30) -> None:
    """Write tensors into numbered files of about `max_file_bytes`, and the index that names them.

    The file names carry no total, which is not known before the stream ends; readers go by the index.

    Raises:
        OSError: the disk is full or not writable.
    """
    weight_map: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    num_bytes = num_files = total_bytes = 0

    def flush() -> None:
        nonlocal num_bytes, num_files
        file = f"model-{num_files:05d}.safetensors"
        try:
            save_file(pending, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:  # which an error of the system becomes there
            raise OSError(f"{folder / file}: {error}") from error
        weight_map.update(dict.fromkeys(pending, file))
        pending.clear()
        num_bytes, num_files = 0, num_files + 1

    for name, tensor in named:
        pending[name] = tensor.detach().cpu().contiguous().clone()
        num_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        if num_bytes >= max_file_bytes:
            flush()
    if pending:
        flush()
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
