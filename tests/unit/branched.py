"""Runs that never trained, with a real checkpoint's state, and generated branches of them.

python -m tests.unit.branched FOLDER [NUM]      NUM seeds (default: 2000); the page of what came of them
"""

import hashlib
import random
import re
import sys
import typing
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from bapo_megatron.algorithms.kl import KLCoefficient
from bapo_megatron.assets import resolve_model_path
from bapo_megatron.branch import Branch, plan_branch
from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.changing import is_resumable
from bapo_megatron.config.engines import engine_kind
from bapo_megatron.config.load import dump_config, load_config
from bapo_megatron.config.losses import DEFAULT, LOSSES
from bapo_megatron.config.paths import options, schema
from bapo_megatron.config.schema import CheckpointConfig, Config
from bapo_megatron.errors import UserError
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.prompts.mixture import prompts_of
from bapo_megatron.rollout.book import RolloutBook, samples_fit
from bapo_megatron.rollout.staleness import StalenessBound
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.resuming import check_resumable
from bapo_megatron.types import Ended, Segment
from tests.unit.saveable import TinyModel

STEP, VERSION = 4, 8
SETTINGS = (
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.groups_in_flight=6",
    "rollout.keep_group=informative",
    "bapo.scope=lagged",
    "reward.running_std=true",
    "loss.kl_coef=0.1",
    "loss.kl_target=0.01",
    "checkpoint.keep_last=9",
    "train.num_steps=9",
    "optimizer.warmup_updates=0",
)


def make_parent(folder: Path, *settings: str, seed: int = 0) -> Path:
    """Return a run with one checkpoint, whose buffer holds growing and judged groups."""
    config = load_config(["demo"], [f"run.dir={folder}", "run.name=parent", *SETTINGS, *settings])
    with RunDir.open(config) as run:
        run.metrics_path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, STEP + 2)))
        store = CheckpointStore(run.checkpoints_dir, config.checkpoint, run_id=run.run_id)
        store.save(STEP, {"learner": TinyModel(1.0)}, state_of(config, random.Random(seed)))
    return run.path


def book_of(config: Config) -> RolloutBook:
    tokenizer = load_tokenizer(resolve_model_path(config.model.path))
    r, t = config.rollout, config.train
    bound = StalenessBound(r.max_staleness, t.minibatches_per_step * t.epochs_per_step, r.prompts_per_step)
    return RolloutBook(r, prompts_of(config, tokenizer), bound)


def state_of(config: Config, rng: random.Random) -> dict[str, Any]:
    book = book_of(config)
    for number in range(6):
        for sample in book.admit(0, 0) if number == 0 else book.growing():
            if rng.random() < 0.6:
                book.start(sample, 0)
                ids = [rng.randrange(4, 14) for _ in range(rng.randint(1, 9))]
                segment = Segment.sampled(rng.randrange(VERSION), number, ids, [-rng.random() - 0.01 for _ in ids])
                book.grow(sample.extended([segment], rng.choice(["stop", "length", None, None])))
        for samples in book.waiting():
            for sample in samples:
                book.answer(replace(sample, need=Ended(sample.finish_reason or "stop", rng.choice([0.0, 1.0]))))
            book.settle(book.group(samples[0].prompt.prompt_id), VERSION)
        if number == 3:
            book.choose(VERSION)
    batches = {"rewards": {"count": 9, "mean": 0.5, "squares": 1.0}}
    updates = {"kl": {"coefficient": 0.3}, "gradients": {"norms": [1.0], "skipped_in_a_row": 0}}
    book.ledger.check(book.buffered())
    return {
        "rollout": {**book.state_dict(), "batches": batches},
        "bounds": {"lagged": [1.0] * 7},
        "updates": updates,
    }


def digest(run: Path) -> str:
    """Return a digest of all names and contents in a folder."""
    found = hashlib.sha256()
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        found.update(str(path.relative_to(run)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def candidates() -> dict[str, list[str]]:
    """Return other values of each setting, from its type, as text."""
    found = {".".join(path): list(_values(field)) for path, field in schema().items() if len(path) > 1}
    for place in ("run.name", "run.dir"):
        del found[place]
    return {setting: values for setting, values in found.items() if values} | {
        "loss.name": [name for name in LOSSES if name != DEFAULT],
        "advantage.kind": ["dr_grpo", "rloo", "gae", "n_step"],
        "reward.kind": ["text", "math", "chains"],
        "reward.judges": ['{one = "text", other = "chains"}'],
        "environment.kind": ["calculator", "guess", "none"],
        "data.source": ["programs", "chains"],
        "data.options": ["{min_terms = 2}", "{max_terms = 4}"],
        "data.sources": [
            '[{name = "a", source = "chains"}, {name = "b", source = "programs"}]',
            '[{name = "a", source = "chains"}, {name = "b", source = "chains"}]',
            '[{name = "b", source = "chains"}]',
        ],
        "data.template_options": [],
        "rollout.engine": ["recorded", "embedded", "attach"],
        "rollout.keep_group": ["all"],
        "model.path": ["moe"],
        "model.family": ["auto"],
    }


def _values(field: Any) -> Iterator[str]:
    for kind in options(field.annotation):
        if typing.get_origin(kind) is Literal:
            yield from map(str, typing.get_args(kind))
        elif kind is bool:
            yield from ("true", "false")
        elif kind is int:
            yield from ("1", "2", "3", "7", "40")
        elif kind is float:
            yield from ("0.5", "0.1", "1.5", "3e-05")
        elif kind is type(None):
            yield "none"


def outcome(parent: Path, seed: int) -> tuple[str, str]:
    """Branch with seeded changes; return what came of it, and the settings. Fail if a statement is not true."""
    rng, pool = random.Random(seed), candidates()
    names = sorted(name for name in pool if pool[name] and (seed % 4 == 0 or not is_resumable(name)))
    names = rng.sample(names, rng.choice([1, 1, 1, 2, 3, 5]))
    given = [f"{name}={rng.choice(pool[name])}" for name in names]
    before = digest(parent)
    new = parent.with_name(f"branch-{seed}")
    try:
        branch = plan_branch(parent, Path(new.name), given)
        branch.write()
    except UserError:  # any other error ends the campaign
        branch = None
    if branch is not None:
        assert_follows(parent, branch)
    assert new.exists() == (branch is not None)
    found = "refused" if branch is None else "left parts" if branch.left else "kept all"
    assert digest(parent) == before
    return found, " ".join(given)


def assert_follows(parent: Path, branch: Branch) -> None:
    """Check that a trainer with the branch's settings takes its checkpoint, and that what it was said to keep is."""
    run = RunDir.attach(branch.path)
    config = load_config([run.config_path])
    assert dump_config(config) == dump_config(branch.config)
    check_resumable(run.path, dump_config(config))
    old = CheckpointStore(parent / "checkpoints", CheckpointConfig()).read(branch.checkpoint)
    store = CheckpointStore(run.checkpoints_dir, config.checkpoint, run_id=run.run_id)
    state = store.resume({"learner": (model := TinyModel(0.0))})
    assert state is not None
    assert (model.value, state["step"]) == (1.0, STEP)
    rollout, told = state["rollout"], " ".join((*branch.kept, *branch.left))
    BatchBuilder(config).load_state_dict(rollout["batches"])
    KLCoefficient(config.loss).load_state_dict(state["updates"]["kl"])
    if not engine_kind(config.rollout.engine).samples:
        assert rollout.keys() == {"recorded_from", "batches"}
        return
    before, after = ({g["prompt"]["prompt_id"]: g for g in _groups(one)} for one in (old["rollout"], rollout))
    assert after.keys() <= before.keys()
    for prompt_id, group in after.items():
        for one, other in zip(group["samples"], before[prompt_id]["samples"], strict=True):
            assert one["sample_id"] == other["sample_id"]
            assert one["trajectories"] == other["trajectories"]
    samples_fit(rollout, type("Info", (), {"context": {}})())
    book = book_of(config)
    book.load_state_dict(rollout)
    book.ledger.check(book.buffered())
    lost = {s["sample_id"] for i in before.keys() - after.keys() for s in before[i]["samples"]}
    assert book.ledger.dropped["branch"] == len(lost)
    tokens = sum(old["rollout"]["ledger"]["tokens"][i] for i in lost)
    assert book.ledger.num_tokens["dropped"] - old["rollout"]["ledger"]["num_tokens"].get("dropped", 0) == tokens
    counted = [tuple(map(int, two)) for two in re.findall(r"(\d+) untrained responses? with (\d+) token", told)]
    assert sum(n for n, _ in counted) == sum(len(g["samples"]) for g in before.values()), told
    assert sum(n for _, n in counted) == sum(old["rollout"]["ledger"]["tokens"].values()), told
    assert not lost or any("untrained response" in text for text in branch.left)
    position = old["rollout"]["prompts"]
    num_given = sum(one["next_id"] for one in position.get("streams", {"": position}).values())
    assert book.prompts.next().prompt_id == num_given, "an id is used twice"


def _groups(rollout: dict[str, Any]) -> list[dict[str, Any]]:
    return [*rollout["active"], *rollout["finished"]]


MIXED = 'data.sources=[{name = "a", source = "chains"}, {name = "b", source = "chains", weight = 3.0}]'


def make_parents(folder: Path) -> list[Path]:
    """Return a plain run, one with mixed prompts, and one with a staleness bound and overlap."""
    others = {"plain": [], "mixed": [MIXED], "overlap": ["rollout.overlap=true", "rollout.max_staleness=9"]}
    return [make_parent(folder / name, *settings, seed=i) for i, (name, settings) in enumerate(others.items())]


def main(folder: Path, num: int) -> None:
    parents = make_parents(folder)
    found: Counter[str] = Counter()
    for seed in range(num):
        kind, given = outcome(parents[seed % len(parents)], seed)
        found[kind] += 1
        print(seed, kind, given, flush=True)
    print(dict(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 2000)
