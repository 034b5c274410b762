"""Damaged checkpoints: a resumed run gets the right state, an older one with a warning, or one clear error.

Every state that is loaded is compared with the one that was saved, to the last bit.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bapo_megatron.algorithms.kl import KLCoefficient
from bapo_megatron.algorithms.update_rules import no_tokens, update_rule
from bapo_megatron.assets import demo_model_path
from bapo_megatron.buffer.batch import BatchBuilder
from bapo_megatron.checkpoint.arrays import detached, write_arrays
from bapo_megatron.checkpoint.folder import (
    DIGEST_FIELD,
    INDEX,
    MOMENTS,
    SQUARES,
    STATE,
    WEIGHT,
    digest_of,
    read_index,
    seal,
    write_index,
)
from bapo_megatron.checkpoint.shard_reader import ShardReader
from bapo_megatron.checkpoint.shards import Snapshot
from bapo_megatron.checkpoint.store import CheckpointStore
from bapo_megatron.config.load import load_config
from bapo_megatron.config.schema import CheckpointConfig, Config
from bapo_megatron.errors import CheckpointError
from bapo_megatron.hf.shape import ModelShape, entries
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.learner.bounds import BoundsFinder
from bapo_megatron.learner.gradient_guard import GradientGuard
from bapo_megatron.learner.slicing import place_shard, to_shard
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.rollout.book import RolloutBook
from bapo_megatron.rollout.staleness import StalenessBound
from bapo_megatron.train import RunState
from bapo_megatron.types import Ended, Segment
from tests.distributed import HANG_S
from tests.outcomes import HangError, Outcomes, deadline
from tests.unit.test_hf_convert import make_shape, random_weights

pytestmark = pytest.mark.slow

NUM_DAMAGES, NUM_EDITS = 300, 150
STEPS = (1, 2, 3)
PARTS = (WEIGHT, *MOMENTS)
Tensors = dict[str, dict[str, Tensor]]  # by part, then by name


class Model:
    """Weights and moments, saved as two tensor-parallel ranks do, and loaded with the checks of `learner.snapshots`."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.tensors: Tensors = {}
        self.version = -1

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        facts: Any = {"version": self.version, "skipped_updates": 0, "model": self.shape.to_json()}
        manifests = []
        for rank in range(2):
            pieces = [
                piece
                for part, named in self.tensors.items()
                for entry in entries(self.shape)
                for shard in [to_shard(entry, lambda n, i, t=named: t[n][i], rank, 2)]
                for piece in place_shard(entry, part, shard, rank, 2)
            ]
            manifests.append(Snapshot(pieces, facts, rank=rank).write(folder))
        (folder / "hf_config").mkdir()
        (folder / "hf_config" / "config.json").write_text("{}")
        companion = folder / "hf_config" / "config.json"
        files = {"hf_config/config.json": [companion.stat().st_size, digest_of(companion)]}
        write_index(folder, facts, [*manifests, {"files": files, "tensors": {}}])

    def snapshot(self) -> Snapshot:
        raise AssertionError("these tests only load")

    def load(self, folder: Path) -> None:
        index = read_index(folder)
        index.check_model(self.shape)
        self.tensors = {}
        for part in PARTS:
            with ShardReader(index, part) as read:
                read.check(self.shape)
                self.tensors[part] = {name: read(name).clone() for name in index.tensors[part]}
        assert not index.tensors.keys() - set(PARTS)
        self.version = index.facts["version"]
        assert index.facts["skipped_updates"] == 0


class Run:
    """Everything that a run saves apart from its models."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.config = config
        self.prompts = PromptStream(config, tokenizer)
        self.book = RolloutBook(config.rollout, self.prompts, StalenessBound(None, 2, 1))
        self.builder = BatchBuilder(config)
        self.finder = BoundsFinder(config, None)  # type: ignore[arg-type]
        self.kl = KLCoefficient(config.loss)
        self.guard = GradientGuard(config)

    def advance(self, step: int) -> None:
        """Finish one group, train none, and leave partial responses."""
        tokens = (5, 6, 7)
        self.book.admit(step, step)
        for number, sample in enumerate(self.book.growing()[:3]):
            self.book.start(sample, step)
            segment = Segment.sampled(step, step, tokens, (-0.5, -0.25, -1.0))
            self.book.grow(sample.extended([segment], "stop" if number < 2 else None))
        for samples in self.book.waiting():
            for sample, reward in zip(samples, (1.0, 0.0), strict=True):
                self.book.answer(replace(sample, need=Ended("stop", reward)))
            self.book.settle(self.book.group(samples[0].prompt.prompt_id), step)
        self.guard.observe(0.5 / step)
        self.finder.load_state_dict({"lagged": [float(bin + step) for bin in range(num_bins(self.config))]})

    def state(self) -> dict[str, Any]:
        return {
            "rollout": {**self.book.state_dict(), "batches": self.builder.state_dict()},
            "bounds": self.finder.state_dict(),
            "updates": {"kl": self.kl.state_dict(), "gradients": self.guard.state_dict()},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a run as `train` does."""
        self.finder.load_state_dict(state["bounds"])
        self.kl.load_state_dict(state["updates"]["kl"])
        self.guard.load_state_dict(state["updates"]["gradients"])
        self.book.load_state_dict(state["rollout"])
        self.builder.load_state_dict(state["rollout"]["batches"])


def num_bins(config: Config) -> int:
    return no_tokens(update_rule(config.loss, config.bapo)).numel()


class Checkpoints:
    """Three whole checkpoints of a run, and what they hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = load_config(
            ["demo"],
            [
                "data.size=20",
                "rollout.prompts_per_step=2",
                "rollout.samples_per_prompt=2",
                "rollout.groups_in_flight=3",
                "loss.kl_coef=0.1",
                "loss.kl_target=0.01",
            ],
        )
        self.tokenizer = load_tokenizer(demo_model_path())
        policy = make_shape("qwen3", num_hidden_layers=1)
        self.shapes = {"learner": policy, "critic": policy.with_value_head()}
        self.saved: dict[int, tuple[dict[str, Tensors], dict[str, Any]]] = {}
        run = Run(self.config, self.tokenizer)
        torch.manual_seed(0)
        for step in STEPS:
            run.advance(step)
            state, arrays = detached(run.state())
            models = self.models()
            path = folder / f"step-{step:06d}"
            parts = {}
            for name, model in models.items():
                model.version = 2 * step
                model.tensors = {part: random_weights(model.shape) for part in PARTS}
                model.tensors[SQUARES] = {name: tensor.square() for name, tensor in model.tensors[SQUARES].items()}
                model.save(path / name)
                parts[name] = {"version": model.version, "index": digest_of(path / name / INDEX)}
            body = {"format": 3, "step": step, **state, "arrays": write_arrays(arrays, path), "parts": parts}
            (path / STATE).write_text(seal(body))
            self.saved[step] = ({name: model.tensors for name, model in models.items()}, plain(run.state()))
        (folder / "latest").write_text(f"step-{STEPS[-1]:06d}")

    def models(self) -> dict[str, Model]:
        return {name: Model(shape) for name, shape in self.shapes.items()}

    def outcome(self, folder: Path) -> tuple[str, str | None]:
        """Resume from a folder as `train` does; return the outcome, and what is wrong with it."""
        models, said = self.models(), []
        store = CheckpointStore(folder, CheckpointConfig(), said.append, state_type=RunState)
        try:
            with deadline(HANG_S):
                state = store.resume(models)
                if state is None:
                    return "silent", "started over without a word"
                run = Run(self.config, self.tokenizer)
                run.load(state)
        except CheckpointError as error:
            if len(str(error)) > 3000 or "\n" in str(error):
                return "clear error", f"an error of {len(str(error))} characters: {str(error)[:200]}"
            return "clear error", None
        except HangError:
            return "hang", "hangs"
        except Exception as error:
            return "traceback", repr(error)[:300]
        tensors, original = self.saved.get(state["step"], ({}, {}))
        if (
            not equal({name: model.tensors for name, model in models.items()}, tensors)
            or plain(run.state()) != original
        ):
            return "silent", f"step {state['step']} was loaded with another content"
        if state["step"] == STEPS[-1]:
            return "right", None
        return "older, with a warning", None if said else "an older step without a warning"


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(state, default=lambda rows: [str(rows.dtype), rows.tolist()]))


def equal(found: dict[str, Tensors], wanted: dict[str, Tensors]) -> bool:
    if found.keys() != wanted.keys():
        return False
    return all(
        found[model][part].keys() == named.keys()
        and all(torch.equal(found[model][part][name], tensor) for name, tensor in named.items())
        for model, parts in wanted.items()
        for part, named in parts.items()
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    found = Checkpoints(tmp_path_factory.mktemp("checkpoints"))
    assert found.outcome(found.folder) == ("right", None)
    return found


# damages: bytes, files and folders


def some_file(rng: random.Random, folder: Path, pattern: str = "*") -> Path:
    """Return a file, usually from the newest step."""
    step = rng.choice((*STEPS, STEPS[-1], STEPS[-1]))
    return rng.choice(sorted(f for f in (folder / f"step-{step:06d}").rglob(pattern) if f.is_file()))


def two_steps(rng: random.Random, folder: Path) -> tuple[Path, Path]:
    one, other = rng.sample(STEPS, 2)
    return folder / f"step-{one:06d}", folder / f"step-{other:06d}"


def flip_bits(rng: random.Random, folder: Path) -> None:
    file = some_file(rng, folder)
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 8))):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def cut(rng: random.Random, folder: Path) -> None:
    file = some_file(rng, folder)
    os.truncate(file, rng.randrange(file.stat().st_size))


def append(rng: random.Random, folder: Path) -> None:
    with some_file(rng, folder).open("ab") as file:
        file.write(rng.randbytes(rng.randrange(1, 100)))


def zero(rng: random.Random, folder: Path) -> None:
    file = some_file(rng, folder)
    start = rng.randrange(file.stat().st_size)
    with file.open("r+b") as stream:
        stream.seek(start)
        stream.write(b"\0" * min(512, file.stat().st_size - start))


def delete_file(rng: random.Random, folder: Path) -> None:
    some_file(rng, folder).unlink()


def delete_folder(rng: random.Random, folder: Path) -> None:
    shutil.rmtree(rng.choice(sorted(f for f in folder.rglob("*") if f.is_dir())))


def header_length(rng: random.Random, folder: Path) -> None:
    with some_file(rng, folder, "*.safetensors").open("r+b") as file:
        file.write(rng.choice((0, 1, 7, 2**31, 2**63, 2**64 - 1, rng.randrange(5000))).to_bytes(8, "little"))


def link(rng: random.Random, folder: Path) -> None:
    """Replace a file by a link: to another file, itself, a device or nothing."""
    file, other = some_file(rng, folder), some_file(rng, folder)
    target = rng.choice((other, file, "/dev/zero", "/dev/null", "/proc/self/mem", "/nowhere", "/", "/dev/urandom"))
    file.unlink()
    file.symlink_to(target)


def no_file(rng: random.Random, folder: Path) -> None:
    """Replace a file by a pipe or a folder."""
    file = some_file(rng, folder)
    file.unlink()
    rng.choice((os.mkfifo, os.mkdir))(file)


def swap(one: Path, other: Path) -> None:
    between = one.with_name("between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


def swap_rank_files(rng: random.Random, folder: Path) -> None:
    learner = folder / f"step-{rng.choice(STEPS):06d}" / rng.choice(("learner", "critic"))
    swap(*sorted(learner.glob("*.safetensors")))


def swap_folders(rng: random.Random, folder: Path) -> None:
    one, other = two_steps(rng, folder)
    match rng.randrange(3):
        case 0:
            swap(one, other)
        case 1:
            swap(one / "learner", other / "learner")
        case 2:
            swap(one / "learner", one / "critic")


def older_part(rng: random.Random, folder: Path) -> None:
    """Copy part of another checkpoint into this one, as a partial restore of a backup does."""
    one, other = two_steps(rng, folder)
    file = some_file(rng, folder).relative_to(folder)
    part = rng.choice(("learner", "critic", STATE, "learner/" + INDEX, str(Path(*file.parts[1:]))))
    if (one / part).is_dir():
        shutil.rmtree(one / part)
        shutil.copytree(other / part, one / part)
    else:
        shutil.copy(other / part, one / part)


def pointer(rng: random.Random, folder: Path) -> None:
    """Damage `latest`, in three cases out of four together with the newest checkpoint."""
    file = folder / "latest"
    file.unlink()
    match rng.randrange(8):
        case 0:
            file.mkdir()
        case 1:
            os.mkfifo(file)
        case 2:
            file.symlink_to(rng.choice(("/dev/zero", "latest", "/nowhere", "step-000002")))
        case 3:
            file.write_bytes(rng.randbytes(30))
        case 4:
            file.write_text("step-" + "9" * rng.choice((6, 18, 5000)))
        case 5:
            file.write_text(rng.choice(("../step-000003", "/etc/passwd", "step-٠٠٠٠٠٣", "step-3", "step-0000003")))
    if rng.randrange(4):
        flip_bits(rng, folder)


DAMAGES: dict[Callable[[random.Random, Path], None], int] = {
    flip_bits: 60,
    cut: 40,
    append: 15,
    zero: 20,
    delete_file: 25,
    delete_folder: 20,
    header_length: 20,
    link: 25,
    no_file: 15,
    swap_rank_files: 10,
    swap_folders: 15,
    older_part: 15,
    pointer: 20,
}


def test_damaged_checkpoints(checkpoints: Checkpoints, tmp_path: Path, outcomes: Outcomes) -> None:
    assert sum(DAMAGES.values()) == NUM_DAMAGES
    for damage, count in DAMAGES.items():
        for seed in range(count):
            folder = tmp_path / f"{damage.__name__}-{seed}"
            shutil.copytree(checkpoints.folder, folder)
            damage(random.Random(f"{damage.__name__}/{seed}"), folder)
            outcome, failure = checkpoints.outcome(folder)
            outcomes.add(damage.__name__, outcome, failure and f"seed {seed}: {failure}")
            shutil.rmtree(folder)
    assert outcomes.total == NUM_DAMAGES


# edits of the JSON, resealed with a correct digest


Place = tuple[Any, Any]  # a dict or list, and a key in it
_ANY_VALUE = ("answer", "model", "state")  # any JSON value is right, or checked by name only


def places(value: Any) -> Iterator[Place]:
    """Yield every place in a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        if key not in _ANY_VALUE:
            yield value, key
            yield from places(value[key])


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def missing(rng: random.Random, body: Any) -> None:
    """Remove a field."""
    holder, key = rng.choice([place for place in places(body) if isinstance(place[0], dict)])
    del holder[key]


def renamed(rng: random.Random, body: Any) -> None:
    """Rename a field."""
    holder, key = rng.choice([place for place in places(body) if isinstance(place[0], dict)])
    holder[rng.choice((f"{key}x", "", "../" + key, "/etc/passwd", "\ud800"))] = holder.pop(key)


def of_another_type(rng: random.Random, body: Any) -> None:
    """Replace a value by one of another type."""
    holder, key = rng.choice(list(places(body)))
    others = [None, True, 1.5, "x", [], {}, [[1]], {"a": 1}, deep(200)]
    number = (int, float)
    kind = type(holder[key])
    if key == "reward":
        others.remove({"a": 1})  # a reward with named parts
    holder[key] = rng.choice(
        [v for v in others if type(v) is not kind and not (isinstance(v, number) and kind is float)]
    )


def out_of_range(rng: random.Random, body: Any) -> None:
    """Make a number negative, huge or not finite."""
    numbers = [(h, k) for h, k in places(body) if type(h[k]) in (int, float)]
    holder, key = rng.choice(numbers)
    huge = (10**30, float("nan"), float("inf"), float("-inf"))
    holder[key] = rng.choice((-1, *huge) if isinstance(holder[key], int) else huge)


def contradicting(rng: random.Random, body: Any) -> None:
    """Change a number that another field, a file or the model contradicts."""
    if "tensors" in body:
        part = rng.choice(sorted(body["tensors"]))
        saved = body["tensors"][part][rng.choice(sorted(body["tensors"][part]))]
        box = rng.choice(saved["boxes"])
        holder, key = rng.choice(
            [(saved["shape"], 0), (box[1], 0), (box[2], 0), (box[2], len(box[2]) - 1), (body["facts"], "version")]
            + [(entry, 0) for entry in body["files"].values()]
        )
    else:
        ledger = body["rollout"]["ledger"]
        holder, key = rng.choice(
            [(body, "step"), (body["parts"]["learner"], "version"), (body["rollout"]["prompts"], "size")]
            + [(ledger["tokens"], name) for name in ledger["tokens"]]
            + [(ledger[counts], name) for counts in ("num_samples", "num_tokens") for name in ledger[counts]]
        )
    holder[key] += 1


def reordered(rng: random.Random, body: Any) -> None:
    """Repeat or lose an entry of a list of boxes or groups."""
    if "tensors" in body:
        part = rng.choice(sorted(body["tensors"]))
        entries = body["tensors"][part][rng.choice(sorted(body["tensors"][part]))]["boxes"]
    else:
        groups = [body["rollout"][name] for name in ("active", "finished")]
        entries = rng.choice([*groups, *(group["samples"] for held in groups for group in held)])
    if rng.randrange(2):
        entries.append(json.loads(json.dumps(rng.choice(entries))))
    else:
        entries.pop(rng.randrange(len(entries)))


def of_another_format(rng: random.Random, body: Any) -> None:
    """Change the format."""
    body["format"] = rng.choice((0, 1, 4, "2", None, [], 2.5, 10**30))


EDITS: dict[Callable[[random.Random, Any], None], int] = {
    missing: 30,
    renamed: 25,
    of_another_type: 40,
    out_of_range: 25,
    contradicting: 15,
    reordered: 10,
    of_another_format: 5,
}


def reseal(step: Path, file: Path, body: Any) -> None:
    """Write an edited body with its correct digest, and tie it to its state.json."""
    file.write_text(seal(body))
    if file.name == INDEX:
        state = json.loads((step / STATE).read_text())
        del state[DIGEST_FIELD]
        state["parts"][file.parent.name]["index"] = digest_of(file)
        (step / STATE).write_text(seal(state))


def test_resealed_edits(checkpoints: Checkpoints, tmp_path: Path, outcomes: Outcomes) -> None:
    assert sum(EDITS.values()) == NUM_EDITS
    for edit, count in EDITS.items():
        for seed in range(count):
            rng = random.Random(f"{edit.__name__}/{seed}")
            folder = tmp_path / f"{edit.__name__}-{seed}"
            shutil.copytree(checkpoints.folder, folder)
            step = folder / f"step-{STEPS[-1]:06d}"
            file = step / rng.choice((STATE, "learner/" + INDEX, "critic/" + INDEX))
            body = json.loads(file.read_text())
            del body[DIGEST_FIELD]
            edit(rng, body)
            reseal(step, file, body)
            if rng.randrange(3) == 0:  # no older checkpoint to fall back to
                for older in STEPS[:-1]:
                    shutil.rmtree(folder / f"step-{older:06d}")
            outcome, failure = checkpoints.outcome(folder)
            outcomes.add(edit.__name__, outcome, failure and f"seed {seed}: {failure}")
            shutil.rmtree(folder)
    assert outcomes.total == NUM_EDITS


@pytest.mark.parametrize("name", [STATE, "learner/" + INDEX])
def test_json_of_many_levels(checkpoints: Checkpoints, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "deep"
    shutil.copytree(checkpoints.folder, folder)
    file = folder / f"step-{STEPS[-1]:06d}" / name
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        file.write_text(opening * 100_000 + "0" + closing * 100_000)
        assert checkpoints.outcome(folder) == ("older, with a warning", None)
