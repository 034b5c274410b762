"""The arrays of a checkpoint's state: values of many tokens, in one file, named by their place in state.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load

from bapo_megatron.checkpoint.folder import DIGEST_FIELD, STATE, digest_of
from bapo_megatron.errors import TornCheckpointError
from bapo_megatron.hf.writer import save_tensors
from bapo_megatron.runtime.files import regular_file
from bapo_megatron.tokens import Array, read_only

ARRAYS = "state.safetensors"


def detached(state: Mapping[str, Any], where: str = "") -> tuple[dict[str, Any], dict[str, Array]]:
    """Split the arrays off a state of nested dicts: return the rest, and the arrays by path."""
    plain: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    for name, value in state.items():
        if isinstance(value, np.ndarray):
            arrays[where + name] = value
        elif isinstance(value, dict):
            plain[name], inner = detached(value, f"{where}{name}/")
            arrays |= inner
        else:
            plain[name] = value
    return plain, arrays


def attach(state: dict[str, Any], arrays: Mapping[str, Array]) -> None:
    """Put arrays back into the dicts that `detached` took them from."""
    for path, array in arrays.items():
        *folders, name = path.split("/")
        place = state
        for folder in folders:
            place = place.setdefault(folder, {})
            if not isinstance(place, dict):
                break
        else:
            place[name] = array


def write_arrays(arrays: Mapping[str, Array], folder: Path) -> str:
    """Write the arrays of a state; return the file's digest.

    Raises:
        CheckpointError: the disk is full, or the folder is not writable.
    """
    save_tensors({path: torch.from_numpy(array) for path, array in arrays.items()}, folder / ARRAYS)
    return digest_of(folder / ARRAYS)


def read_arrays(folder: Path, digest: str) -> dict[str, Array]:
    """Read the arrays that `write_arrays` wrote, read-only.

    Raises:
        TornCheckpointError: the file is missing, or differs from what was written.
    """
    file = folder / ARRAYS
    try:
        data = regular_file(file).read_bytes()
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise TornCheckpointError(f"{file} is torn: its {DIGEST_FIELD} is not the one in {STATE}")
        return {path: read_only(array) for path, array in load(data).items()}
    except FileNotFoundError:
        raise TornCheckpointError(f"{file} is missing") from None
    except (OSError, SafetensorError) as error:
        raise TornCheckpointError(f"cannot read {file}: {error}") from error
