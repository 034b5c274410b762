"""Files that ship with the package, and where a model's path leads."""

from __future__ import annotations

from pathlib import Path

from bapo_megatron.errors import CheckpointError

DEMO_MODEL = "demo"
DOMAINS_MODEL = "study-domains"
SHIPPED = {DEMO_MODEL: "demo-model", DOMAINS_MODEL: "domains-model"}
"""Folders here by what `model.path` calls them."""


def demo_model_path() -> Path:
    """Folder of the demo's model, which knows modular arithmetic (made by scripts/make_demo_model.py)."""
    return Path(__file__).parent / SHIPPED[DEMO_MODEL]


def domains_model_path() -> Path:
    """Folder of the model that knows three small tasks (made by scripts/make_domains_model.py)."""
    return Path(__file__).parent / SHIPPED[DOMAINS_MODEL]


def resolve_model_path(path: str, *, setting: str = "model.path") -> Path:
    """The checkpoint folder that `setting` means: a shipped model for its name, else a local Hugging Face folder.

    Raises CheckpointError if the folder or one of its parts is missing.
    """
    folder = Path(__file__).parent / SHIPPED[path] if path in SHIPPED else Path(path).expanduser()
    missing = _missing_part(folder)
    if missing is None:
        return folder
    if "smollm2" in path.lower():
        advice = f"make it with `python scripts/prepare_smollm2.py {path}`"
    elif path in SHIPPED:
        advice = "this installation is incomplete: install the package again"
    else:
        advice = (
            "give a local folder with config.json, *.safetensors and tokenizer files (hub names are not downloaded)"
        )
    raise CheckpointError(f"{setting} = {path!r}: {missing}; {advice}")


def _missing_part(folder: Path) -> str | None:
    if not folder.is_dir():
        return f"there is no folder {folder.absolute()}"
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json"
    if not any(folder.glob("*.safetensors")):
        return f"{folder} has no *.safetensors"
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return f"{folder} has no tokenizer (tokenizer.json)"
    return None
