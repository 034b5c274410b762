"""A built-in loss is one file: settings, function, traits and metrics; nothing else names it."""

import os
import subprocess
import sys
from pathlib import Path

from bapo_megatron.algorithms import objectives
from bapo_megatron.config.losses import DEFAULT, LOSSES
from tests.distributed import HANG_S

REINFORCE = '''
"""REINFORCE with a constant baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from bapo_megatron.config.schema_loss import LossConfig
from bapo_megatron.metrics import Metric

if TYPE_CHECKING:
    from bapo_megatron.algorithms.losses import LossInputs, TokenLoss

class BaselineLoss(LossConfig):
    """REINFORCE."""

    name: Literal["baseline"] = "baseline"
    metrics = (Metric("loss/baseline_loss_max", "nats", "Largest loss.", tokens="max", of="loss_R"),)

    baseline: float = Field(0.0, ge=0)
    """Subtracted from advantages."""

    def tokens(self, inputs: LossInputs) -> TokenLoss:
        """Compute -(A - baseline) log pi per token."""
        log_probs_R = inputs.log_probs_R.where(inputs.batch.mask_R, 0.0)
        return inputs.plain(-(inputs.batch.advantages_R - self.baseline) * log_probs_R)
'''
USE = """
import sys
import bapo_megatron.algorithms.objectives as objectives

objectives.__path__.append(sys.argv[1])  # as if the file lay with the others

from bapo_megatron.config.load import dump_config, load_config, load_tables
from bapo_megatron.preflight.checks.idle import idle_settings
from bapo_megatron.resolved import resolve
from bapo_megatron.errors import ConfigError
import tomllib

assert "torch" not in sys.modules, "reading a configuration imports no torch"

def message(*overrides):
    try:
        load_config(["demo"], overrides)
    except ConfigError as error:
        return str(error)

config = load_config(["demo"], ["loss.name=baseline", "loss.baseline=0.25", "loss.kl_coef=0.1"])
assert type(config.loss).__name__ == "BaselineLoss" and config.loss.baseline == 0.25
assert load_tables({"dumped": tomllib.loads(dump_config(config))}) == config
assert "did you mean loss.baseline?" in message("loss.name=baseline", "loss.baselin=1")
assert 'but of loss.name="baseline" (' in message("loss.name=sft", "loss.baseline=1")
assert "loss.baseline must be at least 0, got -1" in message("loss.name=baseline", "loss.baseline=-1")
assert '"baseline"' in message("loss.name=baselin")
(idle,) = idle_settings(resolve(load_config(["demo"], ["loss.name=baseline", "monitor.token_profile=true"])))
assert "monitor.token_profile=true has no effect" in idle.message

from bapo_megatron.config.page import metrics_page, settings_page
assert "| `loss/baseline_loss_max` | nats | Largest loss. |  |" in metrics_page()
assert " baseline: REINFORCE. " in settings_page()
assert "| `baseline` | number | `0.0` | baseline: Subtracted from advantages. |" in settings_page()

import math
import torch
from bapo_megatron.algorithms.update_rules import no_tokens, update_rule
from tests.unit.loss_inputs import loss_inputs
from bapo_megatron.learner.token_metrics import TokenMetrics

rule = update_rule(config.loss, config.bapo)
log_probs_R = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
inputs = loss_inputs(log_probs_R=log_probs_R, behaviour_logprobs_R=log_probs_R.detach(),
                     advantages_R=torch.tensor([1.25, -0.75], dtype=torch.float64), mask_R=torch.tensor([True, True]),
                     bounds=rule.decide(no_tokens(rule), None))
assert math.isnan(inputs.bounds.low)
tokens = config.loss.tokens(inputs)
assert tokens.loss_R.tolist() == [1.0, -2.0]
assert float(TokenMetrics(config.loss.metrics).maxima(tokens)["loss/baseline_loss_max"]) == 1.0
print("tried")
"""


def test_a_loss_in_one_file_is_a_setting_a_page_and_a_function(tmp_path: Path) -> None:
    (tmp_path / "baseline.py").write_text(REINFORCE)
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(root)])}
    done = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path)],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "tried\n"), done.stderr


def test_no_other_file_names_a_built_in_loss() -> None:
    """The exception is the default, BAPO, which documentation and reports are about."""
    package = Path(objectives.__file__).parents[2]
    for path in sorted(package.rglob("*.py")):
        if Path(objectives.__file__).parent not in path.parents:
            text = path.read_text(encoding="utf-8")
            for section in [section for name, section in LOSSES.items() if name != DEFAULT]:
                assert section.__name__ not in text, path
