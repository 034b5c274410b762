"""Files that ship with the package, and how model paths are resolved. Start at `resolve_model_path`."""

from pathlib import Path

from bapo_megatron.assets import hub
from bapo_megatron.errors import CheckpointError, closest, did_you_mean

# value of model.path -> folder here
SHIPPED_MODELS = {
    "demo": "demo-model",
    "hybrid": "hybrid-model",
    "moe": "moe-model",
    "tool": "tool-model",
    "study": "study-model",
    "study-domains": "study-domains-model",
}

CHECKOUT = Path(__file__).parents[2]


def demo_model_path() -> Path:
    """Return the folder of the demo's small model (made by scripts/make_demo_model.py)."""
    return shipped_model_path("demo")


def shipped_model_path(name: str) -> Path:
    """Return the folder of a shipped model, by its name in `SHIPPED_MODELS`."""
    return Path(__file__).parent / SHIPPED_MODELS[name]


def model_folder(path: str) -> Path:
    """Return the folder of a value of `model.path`; it need not exist, unless the hub has the model."""
    if path in SHIPPED_MODELS:
        return shipped_model_path(path)
    return hub.snapshot(path, setting="model.path", weights=False) if hub.is_hub_name(path) else Path(path).expanduser()


def resolve_model_path(
    path: str, *, setting: str = "model.path", weights: bool = True, config_only: bool = False
) -> Path:
    """Return the Hugging Face folder for `path`, the value of `setting`.

    Args:
        path: a folder, the name of a shipped model, or a name on the Hugging Face hub, which is downloaded.
        weights: whether to download a hub model's weights, in addition to config.json and the tokenizer.
        config_only: whether config.json is enough, without weights and tokenizer.

    Raises:
        CheckpointError: the folder or one of its parts is missing, or the hub does not provide the model.
    """
    if is_on_hub := path not in SHIPPED_MODELS and hub.is_hub_name(path):
        folder = hub.snapshot(path, setting=setting, weights=weights and not config_only)
    else:
        folder = shipped_model_path(path) if path in SHIPPED_MODELS else Path(path).expanduser()
    missing = _missing_part(folder, config_only)
    if missing is None or (is_on_hub and not weights):
        return folder
    if folder.name.lower() == "smollm2-135m-instruct":
        script = "scripts/prepare_smollm2.py"  # not in a wheel
        has_script = (CHECKOUT / script).exists()
        how = f"python {script}" if has_script else "hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir"
        advice = f"make it with `{how} {path}`"
    elif path in SHIPPED_MODELS:
        advice = "this installation is incomplete: install the package again"
    else:
        advice = did_you_mean(*closest(path, () if folder.is_dir() else SHIPPED_MODELS)) or (
            "give a local folder with config.json, *.safetensors and tokenizer files, or a name on the Hugging Face "
            "hub, such as Qwen/Qwen3-0.6B"
        )
    raise CheckpointError(f"{setting} = {path!r}: {missing}; {advice}")


def _missing_part(folder: Path, config_only: bool) -> str | None:
    if not folder.is_dir():
        return f"there is no folder {folder.absolute()}"
    if not (folder / "config.json").is_file():
        return f"{folder} has no config.json"
    if config_only:
        return None
    if not any(folder.glob("*.safetensors")):
        return f"{folder} has no *.safetensors"
    if not any((folder / name).is_file() for name in hub.TOKENIZER_FILES):
        return f"{folder} has no tokenizer (tokenizer.json)"
    return None
