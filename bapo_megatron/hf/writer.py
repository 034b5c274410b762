"""Writing a Hugging Face checkpoint folder: weights from a stream of tensors, and the files that accompany them."""

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.reader import INDEX, SINGLE

MAX_FILE_BYTES = 2 << 30
_CONFIG = "config.json"
_MAX_COMPANION_BYTES = 64 << 20
_LEFT_OUT = (  # weights in every format and their indexes, adapters, what a trainer needs to resume, caches
    *(
        "*.safetensors*",
        "*.bin",
        "*.pt",
        "*.pth",
        "*.ckpt",
        "*.h5",
        "*.msgpack",
        "*.gguf",
        "*.onnx*",
        "*.npz",
        "*.tflite",
    ),
    *("*.index.json", "adapter_*", "optimizer*", "scheduler*", "rng_state*", "trainer_state*", "training_args*"),
    *("*.pkl", "*.pickle", "*.partial", "*.pyc", "__pycache__", "*.log", "events.out.*", ".*"),
)
log = logging.getLogger(__name__)


def write_safetensors(
    named: Iterable[tuple[str, Tensor]], folder: Path, max_file_bytes: int = MAX_FILE_BYTES
) -> set[str]:
    """Write tensors as one file, or as several with an index; keep one file's tensors in memory at a time.

    Args:
        folder: an existing folder without weights.
        max_file_bytes: tensor bytes per file; a larger tensor gets a file of its own.

    Returns: the types of the tensors, such as {"float32"}.

    Raises:
        CheckpointError: the disk is full, or the folder is not writable.
    """
    pending: dict[str, Tensor] = {}
    files: list[list[str]] = []  # tensor names per file
    num_bytes = total_bytes = 0
    dtypes = set()

    def flush() -> None:
        nonlocal num_bytes
        save_tensors(pending, _partial_file(folder, len(files)))
        files.append(list(pending))
        pending.clear()
        num_bytes = 0

    for name, tensor in named:
        if pending and num_bytes + tensor.nbytes > max_file_bytes:
            flush()
        pending[name] = tensor.detach().cpu().contiguous().clone()  # may alias a weight or another tensor
        num_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
        dtypes.add(str(tensor.dtype).removeprefix("torch."))
    flush()
    if len(files) == 1:
        _partial_file(folder, 0).rename(folder / SINGLE)
        return dtypes
    weight_map = {}
    for i, tensors in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        _partial_file(folder, i).rename(folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    write_durably(folder / INDEX, json.dumps(index, indent=1))
    return dtypes


def _partial_file(folder: Path, number: int) -> Path:
    """Return a file's temporary name: the final one contains the number of files."""
    return folder / f"model-{number:05d}.partial"


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write one safetensors file and sync it to the disk.

    safetensors writes from the tensors' own memory, without a copy and without the interpreter's lock.

    Args:
        tensors: contiguous, on the CPU, unchanged until this function returns.

    Raises:
        CheckpointError: the disk is full, or the folder is not writable.
    """
    try:
        file.touch()  # with the permissions that the umask leaves; safetensors lets only the owner read its file
        mode = file.stat().st_mode
        save_file(dict(tensors), file, metadata={"format": "pt"})
        with file.open("rb") as written:
            os.fsync(written.fileno())
        file.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {file}: {error}") from error


def write_durably(file: Path, text: str) -> None:
    """Write a small text file and sync it to the disk.

    Raises:
        CheckpointError: the disk is full, or the folder is not writable.
    """
    try:
        with file.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise CheckpointError(f"cannot write {file}: {error}") from error


def companions(folder: Path) -> tuple[list[Path], list[str]]:
    """List what a model's folder holds besides weights and what belongs to them.

    Files of subfolders, such as additional_chat_templates/, are included; a subfolder with weights or a config.json of
    its own is another model or a training state, and left out.

    Returns: paths of files relative to `folder`; and names of files and subfolders that are not included because they
        are over 64 MiB, which only JSON files and tokenizers may be, or cannot be read.
    """
    files: list[Path] = []
    large: list[Path] = []
    for path in sorted(folder.iterdir()):
        if _belongs_to_weights(path):
            continue
        if path.is_file():
            (files if _is_companion(path) else large).append(path)
        elif path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            large.append(path)
        elif path.is_dir() and not (path / _CONFIG).exists():
            inside = sorted(file for file in path.iterdir() if file.is_file())
            if any(_belongs_to_weights(file) and not file.name.startswith(".") for file in inside):
                continue
            shown = [file for file in inside if not _belongs_to_weights(file)]
            is_small = sum(file.stat().st_size for file in shown) <= _MAX_COMPANION_BYTES
            if is_small and all(os.access(file, os.R_OK) for file in shown):
                files += shown
            else:
                large.append(path)
    return [path.relative_to(folder) for path in files], [path.name for path in large]


def _belongs_to_weights(path: Path) -> bool:
    return any(fnmatchcase(path.name.lower(), pattern) for pattern in _LEFT_OUT)


def _is_companion(file: Path) -> bool:
    is_small = os.access(file, os.R_OK) and file.stat().st_size <= _MAX_COMPANION_BYTES
    return is_small or file.suffix in (".json", ".model")


def copy_companions(source: Path, target: Path, dtypes: set[str]) -> None:
    """Copy everything but weights: tokenizer, chat templates, generation settings, licence, code.

    config.json comes last, as it makes the folder a checkpoint. A warning names what is left out for its size.

    Args:
        dtypes: types of the weights in `target`; config.json names the type if there is only one.

    Raises:
        CheckpointError: a file cannot be copied.
    """
    try:
        files, large = companions(source)
        for file in files:
            if file != Path(_CONFIG):
                (target / file.parent).mkdir(exist_ok=True)
                shutil.copyfile(source / file, target / file)
        config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot copy {source} to {target}: {error}") from error
    if large:
        _warn_once(
            f"{', '.join(large)} of {source}: over 64 MiB or not readable, so not copied to checkpoints and exports"
        )
    if len(dtypes) == 1:
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part.pop("torch_dtype", None)  # the name before transformers 5
                part["dtype"] = next(iter(dtypes))
    write_durably(target / _CONFIG, json.dumps(config, indent=2) + "\n")


@cache
def _warn_once(message: str) -> None:
    """Warn; a run copies the same folder with each checkpoint."""
    log.warning(message)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to write into, and rename it to `target` if the block succeeds; otherwise remove it.

    A killed process leaves `.writing-<name>` next to the target; the next attempt removes it.

    Raises:
        CheckpointError: the target is not empty, or cannot be written.
    """
    partial = target.with_name(f".writing-{target.name}")
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(f"{target} exists: remove it, or name another folder")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        os.replace(partial, target)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error}; make room there, or name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
