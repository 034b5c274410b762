"""Checkpoints of a whole run: which are kept, and which is the latest."""

from __future__ import annotations

from pathlib import Path

from bapo_megatron.checkpoints import CheckpointStore


def test_a_rewound_run_keeps_the_checkpoint_it_has_just_saved(tmp_path: Path) -> None:
    class Weightless:
        def save(self, folder: Path) -> None:
            pass

    for step in (10, 20, 30):
        CheckpointStore(tmp_path, keep_last=2).save(step, Weightless(), None)  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000020", "step-000030"]
    store = CheckpointStore(tmp_path, keep_last=1)
    (tmp_path / "latest").write_text("step-000020")
    store.save(25, Weightless(), None)  # type: ignore[arg-type]
    assert store.latest() == tmp_path / "step-000025"
    assert (tmp_path / "step-000030").is_dir()
