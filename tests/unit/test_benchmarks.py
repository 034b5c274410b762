"""The benchmarks' common parts: turns and ratios, the command, its page, and the comparison with the baseline."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import gates
from benchmarks.page import COMPARED, RESULTS, benchmarks_page, page
from benchmarks.side_by_side import DisagreementError, Row, same, take_turns
from tests.distributed import HANG_S


def test_ways_take_turns_in_alternating_order_and_a_row_is_the_median_of_the_turns_ratios() -> None:
    now, order = 0.0, []

    def way(name: str, seconds: list[float]) -> Callable[[], int]:
        left = iter(seconds)

        def run() -> int:
            nonlocal now
            now += next(left)
            order.append(name)
            return 7

        return run

    ways = {"ours": way("ours", [100.0, 1.0, 10.0, 1.0]), "other": way("other", [100.0, 2.0, 30.0, 5.0])}
    turns = take_turns(ways, 3, agree=same(), clock=lambda: now)
    assert order == ["ours", "other", "other", "ours", "ours", "other", "other", "ours"]
    row = turns.row("some work", "other", unit="s")
    assert (row.ratio, row.low, row.high, row.num_turns) == (3.0, 2.5, 4.0, 3)
    assert (row.ours, row.theirs, row.unit) == (1.0, 5.0, "s")


def test_a_row_whose_sides_disagree_is_an_error() -> None:
    for ours, other in ((1.0, 1.1), (torch.ones(2), torch.tensor([1.0, 2.0])), ("a", "b"), ((1.0, 2.0), (1.0, 3.0))):
        with pytest.raises(DisagreementError, match="first and second disagree"):
            take_turns({"first": lambda x=ours: x, "second": lambda x=other: x}, 1, agree=same(0.01))
    same(0.2)({"first": (1.0, torch.ones(2)), "second": (1.1, torch.tensor([1.0, 1.1]))})


def test_one_row_as_json(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    assert command.main(["replies", "--quick", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert {"date", "quick", "seconds", "machine", "versions", "rows", "left_out", "failed"} == set(result)
    assert {"cpu", "cores", "system"} == set(result["machine"])
    assert {"python", "torch", "transformers"} <= set(result["versions"])
    assert (result["quick"], result["left_out"], result["failed"]) == (True, [], [])
    text = page(result)
    assert [row.pop("row") for row in result["rows"]] == ["replies"] * 3
    for row in (Row(**fields) for fields in result["rows"]):
        assert 0 < row.low <= row.ratio <= row.high
        assert row.num_turns == 5
        assert min(row.ours, row.theirs) > 0
        assert min(row.load_before, row.load_after) >= 0
    assert f"\n`python -m benchmarks --quick`, {result['date'][:10]}: {result['machine']['cpu']}, " in text
    assert [f"\n{Row(**row)}\n" in text for row in result["rows"]] == [True] * 3


def test_an_unknown_row_is_refused_by_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["packing", "nonsense"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: there is no row nonsense; the rows are clip-bounds, logprobs, packing, ")
    assert error.count("\n") == 1


def test_a_failed_row_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: list[str], errors: Path) -> int:
        errors.write_text("a traceback\nDisagreementError: ours and theirs disagree\n")
        return 1

    monkeypatch.setattr(command, "run", run)
    monkeypatch.setitem(command.ROWS, "no-script", "no_script")
    output = tmp_path / "results.json"
    assert command.main(["packing", "no-script", "replies", "--output", str(output)]) == 1
    result = json.loads(output.read_text())
    error = "DisagreementError: ours and theirs disagree"
    assert result["failed"] == [{"row": "packing", "error": error}, {"row": "replies", "error": error}]
    assert result["left_out"] == [{"row": "no-script", "case": "all", "reason": "there is no benchmarks/no_script.py"}]
    assert "packing: failed" in capsys.readouterr().err


def test_the_page_shows_every_row_of_the_committed_results() -> None:
    assert COMPARED.keys() == command.ROWS.keys()
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    absent = {x["row"] for x in (*result["left_out"], *result["failed"])}
    assert {row["row"] for row in result["rows"]} | absent == command.ROWS.keys()
    text = benchmarks_page()
    for row in result["rows"]:
        assert f"\n{Row(**{k: v for k, v in row.items() if k != 'row'})}\n" in text
    assert all(f"\n- {x['row']}, {x['case']}: {x['reason']}.\n" in text for x in result["left_out"])


def test_a_page_names_what_failed() -> None:
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    failed = {"row": "packing", "error": "DisagreementError: ours and theirs disagree"}
    text = page(result | {"rows": [], "left_out": [], "failed": [failed]})
    assert text.endswith("## Left out\n\n- packing: it failed (DisagreementError: ours and theirs disagree).\n")


def test_a_count_below_the_baseline_is_named_with_the_way_to_renew_it() -> None:
    complaint = gates.check_count("balance", 1.05, 1.083)
    assert complaint == "balance: 1.050, but the baseline is 1.083; if that is intended: " + gates.RENEW
    assert gates.check_count("balance", 1.08, 1.083) is None


def test_speed_is_reported_without_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gates, "RATIOS", dict.fromkeys(gates.RATIOS, lambda: 0.01))
    assert gates.main(["ratios"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == list(gates.RATIOS)
    assert all(": 0.01, baseline " in line for line in lines)


def test_a_history_that_differs_is_named_by_its_first_step() -> None:
    baseline = [{"reward/mean": 0.5, "loss/policy": 0.1}, {"reward/mean": 0.25, "loss/policy": 0.2}]
    assert gates.check_history("demo", [dict(step) for step in baseline], baseline) == []
    nearly = [{**step, "loss/policy": step["loss/policy"] * (1 + 5e-5)} for step in baseline]
    assert gates.check_history("demo", nearly, baseline) == []
    other = [baseline[0], {"reward/mean": 0.25, "loss/policy": 0.201}]
    (complaint,) = gates.check_history("demo", other, baseline)
    assert complaint.startswith("history of demo: step 2: loss/policy is 0.201 instead of 0.2; if that is intended: ")
    (complaint,) = gates.check_history("demo", [{**baseline[0], "loss/policy": float("nan")}, baseline[1]], baseline)
    assert "step 1: loss/policy is nan" in complaint
    assert gates.check_history("demo", baseline[:1], baseline) == ["history of demo: 1 step instead of 2"]


def test_the_baseline_covers_every_gate() -> None:
    baseline = json.loads(gates.BASELINE.read_text())
    assert baseline["ratios"].keys() == gates.RATIOS.keys()
    assert baseline["counts"].keys() == gates.COUNTS.keys()
    assert {name: len(steps) for name, steps in baseline["history"].items()} == gates.HISTORIES
    assert all(set(step) == set(gates.METRICS) for steps in baseline["history"].values() for step in steps)


def gpu_step(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu_step.py", "--tiny", "--turns", "1", *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=HANG_S, check=False)


@pytest.mark.slow
def test_updates_of_several_packs_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "rows.json"
    done = gpu_step(
        "--variants", "te", "te recompute", "te grouped", "--packs=3", "--optimizer-peak", f"--output={output}"
    )
    assert done.returncode == 0, done.stderr
    plain, recomputed, grouped = json.loads(output.read_text()).values()
    assert grouped == {"missing": "the model has no experts"}
    assert next(iter(json.loads(output.read_text()))) == "tiny, 768 tokens of 64, local, 3 packs, optimizer_peak"
    for row in (plain, recomputed):
        assert row["tokens_per_s"] * row["seconds"]["median"] == pytest.approx(3 * 256)
        assert row["share_of_peak"] is row["mfu"] is row["sheet_tflops_per_s"] is None, "a CPU has no data sheet here"
        assert row["share_of_product"] == pytest.approx(row["tflops_per_s"] / row["product_tflops_per_s"])
        assert row["mfu_of_product"] == pytest.approx(row["model_tflops_per_s"] / row["product_tflops_per_s"])
        assert 0 < row["optimizer_mib"] <= row["plan_update_mib"]
        assert len(row["losses"]) == 2
    assert plain["losses"] == recomputed["losses"]

    def overhead(row: dict[str, float]) -> float:
        return row["share_of_product"] / row["mfu_of_product"]

    assert 1 < overhead(plain) < overhead(recomputed) < 4 / 3 + 0.1, "a third more, at most, and logits computed twice"
    refused = gpu_step("--packs=0")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].endswith("error: --packs=0 must be at least 1")
