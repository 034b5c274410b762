"""Whether all packages are there that a run imports. Imports none of them, so that it can say so."""

from __future__ import annotations

import importlib.util

from bapo_megatron.preflight.finding import Finding

# Distribution: module. What setup.py requires.
REQUIRED = {
    "torch": "torch",
    "megatron-core": "megatron",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "tomli-w": "tomli_w",
    "aiohttp": "aiohttp",
    "tqdm": "tqdm",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "math-verify": "math_verify",
    "reasoning-gym": "reasoning_gym",
    "xxhash": "xxhash",
}


def check_required() -> Finding:
    missing = [name for name, module in REQUIRED.items() if importlib.util.find_spec(module) is None]
    if missing:
        what = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        return Finding("packages", "error", what, f"pip install {' '.join(missing)}")
    return Finding("packages", "ok", f"all {len(REQUIRED)} that a run imports are installed")
