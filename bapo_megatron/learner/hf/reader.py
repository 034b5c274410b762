"""Reading tensors, or slices of them, from a Hugging Face checkpoint folder (one safetensors file, or several)."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bapo_megatron.errors import CheckpointError
from bapo_megatron.learner.hf.shapes import ModelShape, hf_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class HFReader:
    """Slices of the tensors in a checkpoint folder; files are opened once and mapped, not loaded.

    Example:
        with HFReader(path) as read:
            top = read("model.embed_tokens.weight", (slice(0, 100),))  # [100, hidden]

    Raises:
        CheckpointError: the folder has no safetensors weights, or a file of the index is missing or torn.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if (index := self.path / INDEX).exists():
            files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        elif (self.path / SINGLE).exists():
            files = [SINGLE]
        else:
            raise CheckpointError(f"{self.path} holds neither {SINGLE} nor {INDEX}: save the model as safetensors")
        self._files = [self._open(self.path / name) for name in files]
        self._file_of = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    @staticmethod
    def _open(file: Path) -> safe_open:
        try:
            return safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {file}: {error}") from error

    def __enter__(self) -> HFReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file_of.clear()
        self._files.clear()  # closes the files: safetensors has no close()

    def __call__(self, name: str, index: tuple[slice, ...]) -> Tensor:
        return self._file_of[name].get_slice(name)[index]

    def check(self, shape: ModelShape) -> None:
        """Compare names and shapes with what config.json promises.

        Raises:
            CheckpointError: lists missing, unexpected and mis-shaped tensors.
        """
        wanted = hf_tensors(shape)
        present = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._file_of.items()}
        ignored = {"lm_head.weight"} if shape.tied_embeddings else set()
        extra = [n for n in present if n not in wanted and n not in ignored and not n.endswith("rotary_emb.inv_freq")]
        complaints = {
            "missing": [name for name in wanted if name not in present],
            "unexpected": extra,
            "of another shape": [
                f"{name} is {list(present[name])}, config.json says {list(size)}"
                for name, size in wanted.items()
                if name in present and present[name] != size
            ],
        }
        found = [f"{len(names)} {what}: {_some(names)}" for what, names in complaints.items() if names]
        if found:
            raise CheckpointError(f"weights in {self.path} do not fit its config.json; " + "; ".join(found))


def _some(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
