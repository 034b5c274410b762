"""Write the plans on docs/one-card.md: python scripts/write_one_card_page.py."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bapo_megatron.config.load import load_config
from bapo_megatron.machine.gpus import FULL, GIB, GPUS
from bapo_megatron.machine.shared_gpu import SharedGPU
from bapo_megatron.preflight.explain import explain_plan
from bapo_megatron.preflight.plan import make_plan, planned

PAGE = Path(__file__).parents[1] / "docs" / "one-card.md"
ONE = ("recipes/qwen2.5-1.5b-gsm8k", "algorithms/bapo", "clusters/1x1-h100")
NODE = ("recipes/r1-distill-qwen-7b-8k", "algorithms/bapo", "clusters/1x8-h100-split")
LORA = (*ONE[:2], "algorithms/lora", ONE[2])
CARDS = ("rtx4090", "l40s", "h100", "h200")
MODELS = {
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
    "3B": "Qwen/Qwen2.5-3B-Instruct",
    "7B": "models/DeepSeek-R1-Distill-Qwen-7B",
}
LORA_MODELS = ("1.5B", "3B", "7B")
_VERSIONS = 2  # copies of the weights in the folder in memory


def filled_page(text: str) -> str:
    """Put each plan between its marks on the page."""
    memory = f"| weights in memory, GiB | {' | '.join(map(_in_memory, MODELS))} |"
    tables = {"fits": f"{fits()}\n{memory}", "lora": fits(LORA, LORA_MODELS)}
    for name, block in {"card": _plan(ONE), "node": _plan(NODE), **tables}.items():
        begin, end = f"<!-- generated: one-card {name} -->", "<!-- end -->"
        before, rest = text.split(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{block}\n{end}{after}"
    return text


def _plan(files: tuple[str, ...]) -> str:
    """Return the verdict of `bapo plan`, and its lines on shared GPUs, as a code block."""
    plan = explain_plan(planned(load_config(files)))
    lines = plan.needs.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("together"))
    last = next(number for number, line in enumerate(lines) if line.startswith("server "))
    shown = [f"$ bapo plan {' '.join(files)}", *plan.verdict.splitlines(), "...", *lines[first : last + 1], "..."]
    return "\n".join(f"    {line}" for line in shown)


def fits(files: Sequence[str] = ONE, models: Sequence[str] = tuple(MODELS)) -> str:
    """Return the table of cards and models as Markdown."""
    lines = [f"| card: GiB to fill | {' | '.join(models)} |", "|---|" + "---|" * len(models)]
    for card in CARDS:
        gpu = GPUS[card]
        cells = (_cell(shared_by(card, model, files=files)) for model in models)
        lines.append(f"| {gpu.name}: {FULL * gpu.memory_gib:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(shared: SharedGPU) -> str:
    """Return what a trainer rank and a server need, and how many responses the server holds."""
    trainer = f"{shared.trainer.total / GIB:.1f}"
    if (without := replace(shared.trainer, update=0).total) < shared.trainer.total:
        trainer += f" ({without / GIB:.1f})"
    needs = f"{trainer} + {shared.server_bytes / GIB:.1f}"
    return f"{needs}: {shared.server.concurrency} responses" if shared.fits else f"no: {needs}"


def shared_by(card: str, model: str, *overrides: str, files: Sequence[str] = ONE) -> SharedGPU:
    """Plan a card for one of the models, with the lengths and packs of the recipe unless overrides change them."""
    settings = [f"model.path={MODELS[model]}", f"cluster.gpu={card}", *overrides]
    shared = make_plan(planned(load_config(files, settings))).shared
    assert shared is not None
    return shared


def _in_memory(model: str) -> str:
    return f"{_VERSIONS * shared_by(CARDS[0], model).server.weights / GIB:.1f}"


if __name__ == "__main__":
    PAGE.write_text(filled_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
