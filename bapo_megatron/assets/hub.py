"""Models on the Hugging Face hub: "Qwen/Qwen3-0.6B", or "Qwen/Qwen3-0.6B@COMMIT" once a run has pinned the commit."""

import json
import re
from pathlib import Path

from bapo_megatron.errors import CheckpointError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w.-]+)?")
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*", "NOTICE*")
_WEIGHTS = ("*.safetensors",)  # weights in other formats are not downloaded
_TIMEOUT_S = 10.0
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # any one of them is enough
_LOCAL = ("models", "runs", "checkpoints")  # usual names of local folders, not accounts on the hub


def is_hub_name(path: str) -> bool:
    """Return whether `path` has the form of a hub name, and its first part is not a folder here."""
    account = path.partition("/")[0]
    return _NAME.fullmatch(path) is not None and account not in _LOCAL and not Path(account).exists()


def is_pinned(path: str) -> bool:
    """Return whether a hub name names a commit."""
    return "@" in path


def pin(path: str, *, setting: str) -> str:
    """Download a model, and return its name with the commit. Raises like `snapshot`."""
    return f"{path.partition('@')[0]}@{snapshot(path, setting=setting).name}"


def snapshot(path: str, *, setting: str, weights: bool = True) -> Path:
    """Return the folder of a model in the hub's cache; download what is missing, with a progress bar.

    Args:
        path: a hub name. A pinned one that is in the cache needs no network.
        weights: whether the weights are needed, in addition to config.json and the tokenizer.

    Raises:
        CheckpointError: the hub does not have it, refuses it, or cannot be reached.
    """
    import httpx
    from huggingface_hub import HfApi, constants, errors, snapshot_download

    name, _, revision = path.partition("@")
    if is_pinned(path) and (cached := _cached(name, revision)) is not None:
        return cached
    try:
        HfApi().model_info(
            name, revision=revision or None, timeout=_TIMEOUT_S
        )  # tried once; a download would retry for a minute
        files = [*_SMALL_FILES, *(_WEIGHTS if weights else ())]
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=files))
    except errors.GatedRepoError:
        problem = f"its owner grants access to it at {constants.ENDPOINT}/{name}; then log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        problem = "the Hugging Face hub has no such model, or a private one, for which `hf auth login` logs in"
    except errors.RevisionNotFoundError:
        problem = f"the model has no revision {revision}"
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        latest = Path(constants.HF_HUB_CACHE, _folder_name(name), "refs", revision or "main")
        if latest.is_file() and (cached := _cached(name, latest.read_text().strip())) is not None:
            return cached
        folder = f"models/{name.partition('/')[2]}"
        at = f" --revision {revision}" if revision else ""
        problem = (
            f"it is not in this machine's cache, and {constants.ENDPOINT} does not provide it ({_reason(error)}); on a "
            f"machine with a network, run `hf download {name}{at} --local-dir {folder}`, and set {setting}={folder}"
        )
    raise CheckpointError(f"{setting} = {path!r}: {problem}")


def _folder_name(name: str) -> str:
    return f"models--{name.replace('/', '--')}"


def _cached(name: str, commit: str) -> Path | None:
    """Return the folder of a commit if the cache has all of it."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, _folder_name(name), "snapshots", commit)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        needed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        needed = {"model.safetensors"}
    has_tokenizer = any((folder / file).is_file() for file in TOKENIZER_FILES)
    is_whole = has_tokenizer and all((folder / file).is_file() for file in (*needed, "config.json"))
    return folder if is_whole else None


def _reason(error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return " ".join(str(cause).split())[:160] or type(cause).__name__
