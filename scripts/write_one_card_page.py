"""Write the plans on docs/one-card.md: python scripts/write_one_card_page.py."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bapo_megatron.config.load import load_config
from bapo_megatron.machine.gpus import FULL, GIB, GPUS
from bapo_megatron.machine.shared_gpu import SharedGPU
from bapo_megatron.preflight.explain import explain_plan, time_text
from bapo_megatron.preflight.plan import make_plan, planned, step_balance

PAGE = Path(__file__).parents[1] / "docs" / "one-card.md"
ONE = ("recipes/qwen2.5-1.5b-gsm8k", "algorithms/bapo", "clusters/1x1-h100")
NODE = ("recipes/r1-distill-qwen-7b-8k", "algorithms/bapo", "clusters/1x8-h100-split")
LORA = (*ONE[:2], "algorithms/lora", ONE[2])
TURNS = ("recipes/qwen2.5-3b-gsm8k", "algorithms/bapo", "clusters/1x1-h100-turns")
LORA_TURNS = (*TURNS[:2], "algorithms/lora", TURNS[2])
PLACEMENTS = {  # files of a split, and the cluster of turns
    "0.5B on a card of 24 GB": (("recipes/qwen2.5-0.5b-gsm8k", *ONE[1:2], "clusters/1x1-rtx4090"), "1x1-rtx4090-turns"),
    "1.5B on a card of 80 GB": (ONE, "1x1-h100-turns"),
    "3B on a card of 80 GB": ((TURNS[0], *ONE[1:]), "1x1-h100-turns"),
    "7B on eight cards of 80 GB": (NODE, "1x8-h100-turns"),
    "14B on eight cards of 80 GB": (("recipes/r1-distill-qwen-14b-8k", *NODE[1:]), "1x8-h100-turns"),
}
CARDS = ("rtx4090", "l40s", "h100", "h200")
MODELS = {
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "1.5B": "Qwen/Qwen2.5-1.5B-Instruct",
    "3B": "Qwen/Qwen2.5-3B-Instruct",
    "7B": "models/DeepSeek-R1-Distill-Qwen-7B",
    "14B": "models/DeepSeek-R1-Distill-Qwen-14B",
}
FULL_MODELS, LORA_MODELS, LORA_TURNS_MODELS = ("0.5B", "1.5B", "3B", "7B"), ("1.5B", "3B", "7B"), ("3B", "7B", "14B")
_VERSIONS = 2  # copies of the weights in the folder in memory


def filled_page(text: str) -> str:
    """Put each plan between its marks on the page."""
    memory = f"| weights in memory, GiB | {' | '.join(map(_in_memory, FULL_MODELS))} |"
    tables = {
        "placements": placements(),
        "fits": f"{fits()}\n{memory}",
        "lora": fits(LORA, LORA_MODELS),
        "turns-fits": f"{fits(TURNS)}\n{_on_host(TURNS, FULL_MODELS)}",
        "turns-lora": f"{fits(LORA_TURNS, LORA_TURNS_MODELS)}\n{_on_host(LORA_TURNS, LORA_TURNS_MODELS)}",
    }
    for name, block in {"card": _plan(ONE), "node": _plan(NODE), "turns": _plan(TURNS), **tables}.items():
        begin, end = f"<!-- generated: one-card {name} -->", "<!-- end -->"
        before, rest = text.split(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{block}\n{end}{after}"
    return text


def _plan(files: tuple[str, ...]) -> str:
    """Return the verdict of `bapo plan`, and its lines on shared GPUs, as a code block."""
    plan = explain_plan(planned(load_config(files)))
    lines = plan.needs.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(("together", "in turns")))
    last = next(number for number, line in enumerate(lines) if line.startswith("server "))
    moved = [line for line in lines if line.startswith(("host ", "moves "))] * ("-turns" in files[-1])
    parts = [*lines[first : last + 1], "...", *([*moved, "..."] if moved else [])]
    shown = [f"$ bapo plan {' '.join(files)}", *plan.verdict.splitlines(), "...", *parts]
    return "\n".join(f"    {line}" for line in shown)


def placements() -> str:
    """Return the table of steps in a split and in turns as Markdown."""
    lines = ["| | split | turns |", "|---|---|---|"]
    for what, (split, turns) in PLACEMENTS.items():
        cells = (_step(files) for files in (split, (*split[:-1], f"clusters/{turns}")))
        lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _step(files: Sequence[str]) -> str:
    run = planned(load_config(files))
    plan = make_plan(run)
    of_step = step_balance(run.config, plan)
    assert of_step is not None
    assert plan.server is not None
    responses = plan.server.concurrency * run.placement.num_servers
    return f"{time_text(of_step.step_s)}, {responses} responses" if plan.fits else "does not fit"


def _on_host(files: Sequence[str], models: Sequence[str]) -> str:
    """Return a row with what weights and state take in the machine's memory."""
    moved = (f"{shared_by(CARDS[0], model, files=files).trainer.moved / GIB:.1f}" for model in models)
    return f"| the machine's memory, GiB | {' | '.join(moved)} |"


def fits(files: Sequence[str] = ONE, models: Sequence[str] = FULL_MODELS) -> str:
    """Return the table of cards and models as Markdown."""
    lines = [f"| card: GiB to fill | {' | '.join(models)} |", "|---|" + "---|" * len(models)]
    for card in CARDS:
        gpu = GPUS[card]
        cells = (_cell(shared_by(card, model, files=files)) for model in models)
        lines.append(f"| {gpu.name}: {FULL * gpu.memory_gib:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(shared: SharedGPU) -> str:
    """Return what a trainer rank and a server need, or the phase that needs most; and the server's responses."""
    if shared.takes_turns:
        phase, most = max(((name, sum(both)) for name, both in shared.phases.items()), key=lambda one: one[1])
        needs = f"{phase} {most / GIB:.1f}"
        return f"{needs}: {shared.server.concurrency} responses" if shared.fits else f"no: {needs}"
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
