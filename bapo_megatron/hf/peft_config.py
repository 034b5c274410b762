"""The settings of a PEFT folder, which say how its adapters are computed. This needs no torch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.adapters import TARGETS, Adapters

CONFIG = "adapter_config.json"
_PLAIN: dict[str, tuple[Any, ...]] = {  # the values of options with which an adapter is alpha / rank * B A
    "bias": ("none",),
    "use_dora": (False,),
    "use_rslora": (False,),
    "fan_in_fan_out": (False,),
    "lora_bias": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None,),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "exclude_modules": (None, []),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the model's own weights
}


def read_adapters(folder: Path) -> Adapters:
    """Read rank, alpha and targets of a PEFT folder.

    Raises:
        CheckpointError: the folder has no adapters of LoRA, or an option that changes the computation.
    """
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror or error}; is {folder} a PEFT folder?") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else config
        raise CheckpointError(f"{file}: peft_type is {kind!r}, and only LORA is supported")
    for name, plain in _PLAIN.items():
        if (value := config.get(name, plain[0])) not in plain:
            raise CheckpointError(f"{file}: {name}={json.dumps(value)} is not supported, only {json.dumps(plain[0])}")
    rank, alpha, targets = config.get("r", 0), config.get("lora_alpha", 0), config.get("target_modules")
    if type(rank) is not int or rank < 1 or type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise CheckpointError(f"{file}: r={json.dumps(rank)} and lora_alpha={json.dumps(alpha)} must be above 0")
    if targets == "all-linear":
        targets = list(TARGETS)
    if not isinstance(targets, list) or not targets or any(name not in TARGETS for name in targets):
        problem = f"{file}: target_modules={json.dumps(targets)} is not supported"
        raise CheckpointError(f"{problem}; it must be a list with some of {', '.join(TARGETS)}")
    return Adapters(rank, float(alpha), tuple(name for name in TARGETS if name in targets))
