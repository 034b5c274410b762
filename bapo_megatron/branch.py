"""`bapo branch`: a new run that starts from a checkpoint of another, with other settings.

<run>/checkpoints/step-N  ->  <new>/checkpoints/step-N      the models as links, the state as far as it can follow
      metrics.jsonl ...   ->        metrics.jsonl ...       the steps until then; parent.json names the run

`config/changing.py` says what a change of each setting leaves behind. The new folder is an ordinary run, which
`bapo train` resumes; nothing else knows how it came to be.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_megatron.assets import resolve_model_path
from bapo_megatron.checkpoint.saving import flush
from bapo_megatron.checkpoint.store import CheckpointStore, branch_checkpoint
from bapo_megatron.config.base import overlap
from bapo_megatron.config.changing import Part, parts_left_by
from bapo_megatron.config.load import Reading, dump_config, load_tables, parse_overrides, read_tables
from bapo_megatron.config.losses import CUSTOM, LOSS_SECTIONS
from bapo_megatron.config.lr_schedule import learning_rate, planned_updates
from bapo_megatron.config.schema import CheckpointConfig, Config, SourceConfig
from bapo_megatron.config.schema_loss import PRESETS, ClipBoundConfig, LossConfig, RatioOptions
from bapo_megatron.errors import CheckpointError, TornCheckpointError, UserError, collecting, plural
from bapo_megatron.hf.tokenizer import load_tokenizer
from bapo_megatron.hf.writer import atomic_folder
from bapo_megatron.monitor.console import shown_path
from bapo_megatron.preflight.check import tell, violations_of
from bapo_megatron.prompts.mixture import PromptMixture, prompts_of
from bapo_megatron.prompts.stream import PromptStream
from bapo_megatron.resolved import resolve
from bapo_megatron.rollout.group_files import with_values
from bapo_megatron.rollout.ledger import Ledger
from bapo_megatron.runs.branching import Parent, write_parent
from bapo_megatron.runs.folder import RunDir
from bapo_megatron.runs.inputs import changed_inputs, module_digests, settings_of_input
from bapo_megatron.runs.resuming import different_settings, steps_saved, with_pins
from bapo_megatron.runtime.files import reading, truncate_after, write_atomically
from bapo_megatron.tokens import JoinedRows

_RECORDS = ("metrics.jsonl", "samples.jsonl")  # by step


@dataclass(slots=True)
class Branch:
    """A new run, before it is written."""

    path: Path
    config: Config
    parent: Parent
    checkpoint: Path
    """The parent's."""
    state: dict[str, Any]
    """The new checkpoint's state."""
    kept: list[str]
    """What it keeps of the parent's checkpoint, in words."""
    left: list[str]
    """What it leaves behind, in words, with the settings that cause this."""
    notes: list[str]

    @property
    def facts(self) -> Iterator[tuple[str, str]]:
        """The facts to show before it is written."""
        yield "from", f"{shown_path(Path(self.parent.run))} after {plural(self.parent.step, 'step')}"
        yield "changes", self.parent.changes
        yield "keeps", "; ".join(self.kept)
        yield "leaves", "; ".join(self.left) or "nothing"
        yield from (("note", note) for note in self.notes)

    def write(self) -> None:
        """Write the folder in one move, or leave nothing behind.

        Raises:
            UserError: the disk is full, the folder exists, or the parent's checkpoint is gone.
        """
        parent = Path(self.parent.run)
        with atomic_folder(self.path) as folder:
            write_atomically(folder / "config.toml", dump_config(self.config))
            write_atomically(folder / "run-id.txt", f"{self.state['run']}\n")
            write_parent(folder, self.parent)
            for name in ("own_metrics.json", *_RECORDS):
                if (parent / name).exists():
                    shutil.copyfile(parent / name, folder / name)
            for name in _RECORDS:
                truncate_after(folder / name, self.parent.step)
            try:
                branch_checkpoint(self.checkpoint, folder / "checkpoints" / self.checkpoint.name, self.state)
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"{self.checkpoint} is gone: its run has meanwhile saved later ones; branch again"
                ) from error
            for path in (*folder.rglob("*"), folder):
                flush(path)


def plan_branch(run: Path, new: Path, settings: Sequence[str], step: int | None = None) -> Branch:
    """Return the branch of a run with other settings; nothing is written.

    Args:
        run: the parent's folder.
        new: the new folder; a bare name is next to the parent.
        settings: such as "optimizer.lr=1e-6".
        step: number of finished steps of the checkpoint to start from; None means the latest.

    Raises:
        UserError: the settings are wrong, the weights cannot follow them, the new folder exists, or there is no such
            run or checkpoint, or it is damaged; names all of this together.
    """
    place = Path(os.path.abspath(run))
    path = place.with_name(str(new)) if new.name == str(new) else Path(os.path.abspath(new))
    problems = [f"{path} exists: give the branch another name, or remove it"] if os.path.lexists(path) else []
    try:
        parent = RunDir.attach(place)
        table = _table_of(parent.config_path)
        old = load_tables({str(parent.config_path): table})
    except UserError as error:
        problems += [str(error), *(v.message for v in read_tables({}, settings).violations)]
        raise UserError("\n".join(problems)) from error
    found = _changed(table, parent.config_path, path, settings)
    with collecting(problems):
        step, checkpoint = _checkpoint(parent, step)
        if step >= found.config.train.num_steps and "train.num_steps" not in found.unread:
            problems.append(
                f"{checkpoint} is after {plural(step, 'step')}, and train.num_steps is {found.config.train.num_steps}: "
                f"set it to more, such as train.num_steps={2 * step}, or start from an earlier checkpoint with --step"
            )
    problems += _refused(old, found, path, settings)
    if problems:
        raise UserError("\n".join(problems))
    config = with_pins(found.config)
    state = _state(parent, checkpoint)
    changed = _changes(old, config)
    inputs = {one: settings_of_input(one, old) for one in changed_inputs(parent.inputs_path, _inputs(old))}
    of_inputs = {setting for settings in inputs.values() for setting in settings}
    branch = Branch(
        path, config, Parent(str(parent.path), step, changed), checkpoint, state, kept=[], left=[], notes=[]
    )
    _Change(old, config, [*changed, *sorted(of_inputs)], of_inputs, branch).apply()
    branch.notes += [f"{one} has other contents than in {parent.path.name}" for one in inputs]
    if parent.rollouts_dir.is_dir():
        branch.notes.append(f"recorded rollouts stay in {shown_path(parent.rollouts_dir)}")
    state["run"] = secrets.token_hex(8)
    return branch


def _inputs(config: Config) -> dict[str, str]:
    """Return the digests of the inputs that a run with these settings would read, without missing ones."""
    found = module_digests(config)
    if resolve(config).engine.samples:
        with contextlib.suppress(UserError):  # such as a file that is gone, which the branch replaces
            found |= _prompts(config).digests()
    return found


def _prompts(config: Config) -> PromptStream | PromptMixture:
    run = resolve(config, resolve_model_path(config.model.path))
    return prompts_of(config, load_tokenizer(run.folder, run.own))


def _changes(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, without the run's place."""
    changed = different_settings(dump_config(old), dump_config(new))
    return {name: values for name, values in changed.items() if name not in ("run.dir", "run.name")}


def _table_of(config_path: Path) -> dict[str, Any]:
    with reading(config_path):
        try:
            return tomllib.loads(config_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{config_path.parent} is not the folder of a run; give one, such as runs/demo") from None
        except ValueError as error:
            raise UserError(
                f"{config_path} is damaged ({error}); restore it from logs/attempt-N/config.toml"
            ) from error


def _changed(table: dict[str, Any], file: Path, new: Path, settings: Sequence[str]) -> Reading:
    """Read the parent's settings with the changes. A new loss, preset or environment drops the settings of the old one.

    The parent's file holds every setting, also those that were left to a default.
    """
    given = {".".join(path): value for _, path, value in parse_overrides(settings)[0]}
    of = {name: table.setdefault(name, {}) for name in ("loss", "bapo", "environment")}
    if given.get("loss.name", of["loss"].get("name")) != of["loss"].get("name"):
        shared = LossConfig.model_fields.keys() | RatioOptions.model_fields.keys()
        fields = LOSS_SECTIONS.get(given["loss.name"], LOSS_SECTIONS[CUSTOM]).model_fields.keys()
        table["loss"] = {key: value for key, value in of["loss"].items() if key in shared & fields}
    if "bapo.preset" in given:
        preset = str(of["bapo"].get("preset"))
        base = ClipBoundConfig.model_validate({"preset": preset} if preset in PRESETS else {}).model_dump()
        table["bapo"] = {key: value for key, value in of["bapo"].items() if value != base.get(key)}
    if given.get("environment.kind", of["environment"].get("kind")) != of["environment"].get("kind"):
        of["environment"].pop("options", None)
    place = [f"run.name={new.name}", f"run.dir={shown_path(new.parent)}"]
    return read_tables({str(file): table}, [*settings, *place])


def _refused(old: Config, found: Reading, new: Path, settings: Sequence[str]) -> list[str]:
    """Return what is wrong with the settings of a branch; tell warnings."""
    given = [text.partition("=")[0].strip() for text in settings]
    named = [name for name in ("run.name", "run.dir") if name in given]
    wrong = [f"{name} follows from the branch's folder, {new}: leave it out" for name in named]
    known = (name for name in _changes(old, found.config) if not overlap([name], found.unread))
    if lost := [name for name in known if "weights" in parts_left_by(name)]:
        wrong.append(
            f"{' and '.join(lost)} cannot change in a branch, which would lose the weights and Adam's moments, and so "
            "everything learned: leave it out, or start a new run with `bapo train`"
        )
    others = violations_of(found.config, elsewhere=True, given=found.given, unread=found.unread)
    tell(others)
    return wrong + [v.message for v in (*found.violations, *others) if v.severity == "error"]


def _checkpoint(run: RunDir, step: int | None) -> tuple[int, Path]:
    """Return the checkpoint after `step` steps, or the latest one."""
    if step is None:
        latest = CheckpointStore(run.checkpoints_dir, CheckpointConfig()).latest()
        if latest is None:
            raise CheckpointError(f"{run.path} has no checkpoint yet; a branch starts from one")
        return int(latest.name.removeprefix("step-")), latest
    path = run.checkpoints_dir / f"step-{step:06d}"
    if not path.is_dir():
        there = ", ".join(map(str, steps_saved(run.path))) or "none"
        raise CheckpointError(
            f"{run.path} has no checkpoint after {plural(step, 'step')}; it has: {there} (checkpoint.keep_last keeps "
            "the newest)"
        )
    return step, path


def _state(run: RunDir, checkpoint: Path) -> dict[str, Any]:
    """Return the state of a checkpoint whose files are all as they were written."""
    try:
        return CheckpointStore(run.checkpoints_dir, CheckpointConfig(), run_id=run.run_id).read(checkpoint)
    except TornCheckpointError as error:
        raise CheckpointError(f"{error}; branch from another checkpoint with --step") from error


class _Change:
    """The change of a checkpoint's state from one configuration to another; it tells the branch what it does.

    Args:
        changed: settings that differ in value, or name an input that differs.
        of_inputs: the latter.
    """

    def __init__(
        self, old: Config, new: Config, changed: Sequence[str], of_inputs: Collection[str], branch: Branch
    ) -> None:
        self._old, self._new, self._branch, self._state = old, new, branch, branch.state
        self._changed, self._of_inputs = changed, of_inputs
        self._because: dict[Part, list[str]] = {}
        for setting in changed:
            for part in parts_left_by(setting):
                self._because.setdefault(part, []).append(setting)

    def apply(self) -> None:
        updates = plural(self._state["parts"]["learner"]["version"], "update")
        self._branch.kept.append(f"weights and Adam's moments after {updates}")
        self._critic()
        self._rollouts()
        self._statistics()
        self._rate()

    def _why(self, *parts: Part) -> str:
        """Return the settings that leave any of the parts behind."""
        return " and ".join(dict.fromkeys(name for part in parts for name in self._because.get(part, ())))

    def _leave(self, what: str, *parts: Part) -> None:
        self._branch.left.append(f"{what}, because of {self._why(*parts)}")

    def _critic(self) -> None:
        parts = self._state["parts"]
        had, has = "critic" in parts, _has_critic(self._new)
        if had and has and "critic" not in self._because:
            self._branch.kept.append("the critic and its Adam's moments")
            return
        if had:
            del parts["critic"]
            decide = [name for name in ("advantage.kind", "train.rollout_only") if name in self._changed]
            why = self._why("critic") if has else " and ".join(decide)
            self._branch.left.append(f"the critic and its Adam's moments, because of {why}")
        self._state.pop("begin_anew", None)
        if has:
            self._state["begin_anew"] = ["critic"]
            start = self._new.critic.path or self._new.model.path
            self._branch.notes.append(
                f"the critic begins anew, from {start}; critic.warmup_steps counts from the first step of the parent"
            )

    def _rollouts(self) -> None:
        state, branch = self._state, self._branch
        rollout = state["rollout"]
        if not resolve(self._new).engine.samples:
            if "recorded_from" not in rollout:
                branch.left.append(f"the prompts' position and {_responses(rollout)}, because of rollout.engine")
            state["rollout"] = {"recorded_from": self._new.rollout.recorded_from, "batches": rollout["batches"]}
            return
        if "recorded_from" in rollout:
            rollout = state["rollout"] = {
                "prompts": None,
                "ledger": Ledger().state_dict(),
                "active": [],
                "finished": [],
                "rows": {},
                "batches": rollout["batches"],
            }
        same = self._same_sources()
        if rollout["ledger"]["states"]:
            self._drop(rollout, same)
        if rollout["prompts"] is None or "prompt position" in self._because:
            self._restart_prompts(rollout, same)
        else:
            branch.kept.append("the prompts' position")
        if "their rewards" in self._because and rollout["finished"]:
            self._judge_again(rollout)
        if rollout["ledger"]["states"]:
            anew = ", of which unfinished agent programs begin anew" if self._new.environment.is_agent else ""
            branch.kept.append(_responses(rollout) + anew)
            if self._new.rollout.max_staleness is not None:
                branch.notes.append(
                    "responses that rollout.max_staleness does not let train in time are dropped as stale"
                )
        branch.kept.append("the ledger")

    def _same_sources(self) -> set[str]:
        """Return the tables of prompt sources that are the same in both configurations, with the same rows."""
        old, new = self._old.prompt_sources, self._new.prompt_sources

        def is_same(table: str) -> bool:
            names = SourceConfig.model_fields
            return table in old and all(getattr(old[table], name) == getattr(new[table], name) for name in names)

        return {table for table in new if is_same(table) and f"{table}.path" not in self._of_inputs}

    def _drop(self, rollout: dict[str, Any], same: set[str]) -> None:
        """Drop the groups that cannot follow, and book them in the ledger."""
        is_mixed = "streams" in rollout["prompts"]
        has_environment = self._old.environment.is_used or self._new.environment.is_used
        limit, longest = self._new.data.max_prompt_tokens, self._new.rollout.max_response_tokens
        num_tokens = rollout["ledger"]["tokens"]

        def cause(group: Mapping[str, Any]) -> Part | None:
            table = f"data.sources.{group['prompt']['source']}" if is_mixed else "data"
            if table not in same:
                return "responses of the source"
            if "untrained responses" in self._because:
                return "untrained responses"
            if "their rewards" in self._because and has_environment:
                return "their rewards"
            if "longer responses" not in self._because:
                return None
            is_long = len(group["prompt"]["token_ids"]) > limit or any(
                num_tokens[sample["sample_id"]] >= longest + (sample["need"]["needs"] == "nothing")
                for sample in group["samples"]
            )
            return "longer responses" if is_long else None

        ledger, rows, kept_rows = Ledger(), JoinedRows(rollout["rows"]), JoinedRows()
        ledger.load_state_dict(rollout["ledger"])
        dropped: dict[Part, list[str]] = {}
        for name in ("active", "finished"):
            kept = []
            for group in rollout[name]:
                whole = with_values(group, rows.take)
                if (part := cause(group)) is None:
                    kept.append(with_values(whole, kept_rows.put))
                else:
                    dropped.setdefault(part, []).extend(sample["sample_id"] for sample in group["samples"])
            rollout[name] = kept
        for part, ids in dropped.items():
            self._leave(_counted(len(ids), sum(num_tokens[i] for i in ids)), part)
            for sample_id in ids:
                ledger.drop(sample_id, "branch")
        rollout |= {"ledger": ledger.state_dict(), "rows": kept_rows.arrays()}

    def _restart_prompts(self, rollout: dict[str, Any], same: set[str]) -> None:
        """Begin the sources that differ anew, with new ids; the others keep their position."""
        config, before = self._new, rollout["prompts"] or {}
        prompts = _prompts(config)
        given = [one["next_id"] for one in before.get("streams", {"": before}).values()] if before else [0]
        prompts.begin_after(sum(given))
        state = rollout["prompts"] = prompts.state_dict()
        if self._old.run.seed == config.run.seed and before:
            for table in same:
                name = table.removeprefix("data.sources.")
                one = before["streams"][name] if name in before.get("streams", {}) else before
                one = {key: value for key, value in one.items() if key != "next_id"}
                (state["streams"][name] if "streams" in state else state).update(one)
        else:
            same = set()
        if others := [table for table in config.prompt_sources if table not in same]:
            why = self._why("prompt position") or "rollout.engine"
            self._branch.left.append(f"the prompts' position in {', '.join(others)}, because of {why}")
        if same:
            self._branch.kept.append(f"the prompts' position in {', '.join(sorted(same))}")

    def _judge_again(self, rollout: dict[str, Any]) -> None:
        """Let the judge see finished responses again."""
        num = 0
        for group in rollout["finished"]:
            for sample in group["samples"]:
                need, last = sample["need"], len(sample["trajectories"]) - 1
                sample["need"] = {"needs": "environment", "turn_end": need["reason"], "trajectory": last}
                num += 1
        rollout["active"] += rollout.pop("finished")
        rollout["finished"] = []
        self._leave(f"the rewards of {plural(num, 'response')}, which are judged again", "their rewards")

    def _statistics(self) -> None:
        """Reset what was measured with other settings."""
        state = self._state
        moments = state["rollout"]["batches"]["rewards"]
        if moments["count"] and "reward statistics" in self._because:
            moments |= {"count": 0, "mean": 0.0, "squares": 0.0}
            self._leave("the running statistics of rewards", "reward statistics")
        if state["bounds"]["lagged"] is not None and "bounds" in self._because:
            state["bounds"] = {"lagged": None}
            self._leave("the table behind the bounds of earlier updates", "bounds")
        kl = state["updates"]["kl"]
        if kl["coefficient"] is not None and "KL coefficient" in self._because:
            kl["coefficient"] = None
            self._leave("the adapted KL coefficient", "KL coefficient")

    def _rate(self) -> None:
        """Tell the learning rates before and after, if they differ."""
        version = self._state["parts"]["learner"]["version"]
        before, after = (learning_rate(version, c.optimizer, planned_updates(c)) for c in (self._old, self._new))
        if before != after:
            self._branch.notes.append(f"the next learning rate is {after:.3g}; the parent's was {before:.3g}")


def _has_critic(config: Config) -> bool:
    return not (config.advantage.compares_responses or config.train.rollout_only)


def _responses(rollout: Mapping[str, Any]) -> str:
    ledger = rollout["ledger"]
    return _counted(len(ledger["states"]), sum(ledger["tokens"].values()))


def _counted(num_responses: int, num_tokens: int) -> str:
    return f"{plural(num_responses, 'untrained response')} with {plural(num_tokens, 'token')}"
