"""One call of a user's own loss on a made-up micro-batch, so that its mistakes show before a run starts."""

import inspect
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bapo_megatron.config.base import Violation, warning
from bapo_megatron.config.losses import CustomLoss
from bapo_megatron.errors import in_one_line
from bapo_megatron.resolved import Resolved

if TYPE_CHECKING:
    from bapo_megatron.algorithms.losses import LossInputs
    from bapo_megatron.tokens import TokenStream

_SETTINGS = ("loss.name", "loss.options")
_WHERE = "on a made-up micro-batch of four tokens"
_REMEDY = "correct the function"


def try_loss(run: Resolved, *, elsewhere: bool) -> Iterator[Violation]:
    """Call the loss, if it is the user's own, and its update rule. Imports torch.

    Args:
        elsewhere: whether the run is for another machine, whose GPUs a function may need.
    """
    loss = run.config.loss
    if not isinstance(loss, CustomLoss):
        return
    name = f'loss.name="{loss.name}"'
    try:
        inputs = _inputs(run)
        record = loss.tokens(inputs)
        problem = _problem(loss, inputs, record)
        if problem is None:
            record.loss_R.sum().backward()
    except Exception as error:  # the function is the user's
        what = in_one_line(error)
        problem = f"{name} fails {_WHERE}: {what}{_line(loss, error)}"
        is_sure = not (elsewhere and isinstance(error, RuntimeError))
        yield Violation(_SETTINGS, problem, _REMEDY, "error" if is_sure else "warning")
        return
    if problem is not None:
        yield Violation(_SETTINGS, f"{name} {problem}{_definition(loss)}", _REMEDY)
    elif not bool(record.loss_R.isfinite().all()):
        yield warning(_SETTINGS, f"{name} is {record.loss_R.tolist()} {_WHERE}{_definition(loss)}", "look for its nan")


def _inputs(run: Resolved) -> "LossInputs":
    """Make a micro-batch with two responses of two tokens; the last token is masked."""
    import dataclasses

    import torch

    from bapo_megatron.algorithms.losses import LossInputs, ScoredTokens
    from bapo_megatron.algorithms.update_rules import Again, no_tokens, update_rule
    from bapo_megatron.types import MicroBatch

    def rows_of(stream: "TokenStream") -> torch.Tensor:
        return torch.from_numpy(stream.filled(6 if stream.on == "fed" else 4).copy())

    config, loss = run.config, run.config.loss
    log_probs_R = torch.tensor([-1.0, -0.5, -2.0, -1.5], requires_grad=True)
    sampled_R = log_probs_R.detach() + torch.tensor([0.1, -0.1, 0.1, -0.1])
    streams = [one.stream for one in loss.streams]
    if run.model is not None:  # with the streams of its family
        streams += run.model.streams
    streams += [stream for one in run.annotators for stream in one.streams]
    batch = MicroBatch(
        token_ids_T=torch.arange(6),
        position_ids_T=torch.tensor([0, 1, 2] * 2),
        cu_seqlens_S1=torch.tensor([0, 3, 6], dtype=torch.int32),
        rows_R=torch.tensor([0, 1, 3, 4]),
        sequence_R=torch.tensor([0, 0, 1, 1]),
        batch_rows_R=torch.arange(4),
        targets_R=torch.tensor([1, 2, 4, 5]),
        advantages_R=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        behaviour_logprobs_R=sampled_R,
        versions_R=torch.zeros(4, dtype=torch.int64),
        mask_R=torch.tensor([True, True, True, False]),
        proximal_logprobs_R=sampled_R if loss.scores_proximal else None,
        reference_logprobs_R=sampled_R if loss.kl_coef else None,
        extra={stream: rows_of(stream) for stream in streams},
    )
    rule, found = update_rule(loss, config.bapo), Again(None)
    entropy_R = torch.ones(4)
    known_R = entropy_R if loss.reads_entropy else None
    tokens = ScoredTokens(batch, log_probs_R.detach(), batch.versions_R, entropy_R=known_R)
    reads = config.rule_reads != "nothing"
    values = rule.values(tokens) if reads else None
    while isinstance(found, Again):
        total = rule.table(values, found.so_far).cpu() if reads else no_tokens(rule)
        found = rule.decide(total, found.so_far)
    if rule.masks:
        batch = dataclasses.replace(batch, mask_R=rule.mask(tokens, found))
    return LossInputs(batch, log_probs_R, batch.versions_R, entropy_R=entropy_R, found=found)


def _problem(loss: CustomLoss, inputs: "LossInputs", record: Any) -> str | None:
    """Return what is wrong with the record that the function returned."""
    from torch import Tensor

    from bapo_megatron.algorithms.losses import TokenLoss

    if not isinstance(record, TokenLoss):
        shape = f" of shape {list(record.shape)}" if isinstance(record, Tensor) else ""
        return (
            f"returned a {type(record).__name__}{shape} {_WHERE}, not a TokenLoss with one value for each token: "
            "`return inputs.plain(loss_R)`"
        )
    loss_R = record.loss_R
    if not isinstance(loss_R, Tensor) or loss_R.shape != inputs.log_probs_R.shape:
        found = list(loss_R.shape) if isinstance(loss_R, Tensor) else repr(loss_R)
        return f"returned a loss_R of {found} {_WHERE}, not of [4]: one value for each token"
    if not loss_R.requires_grad:
        return "returned a loss_R that does not depend on inputs.log_probs_R, so that nothing would be learned"
    missing = [metric for metric in loss.metrics if metric.of and not hasattr(record, metric.of)]
    if missing:
        return f"returned a {type(record).__name__} without {missing[0].of}, which {missing[0].key} needs"
    return None


def _line(loss: CustomLoss, error: Exception) -> str:
    """Name the line of the user's file at which an error arose, or else the last line of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    file = _place(loss)[0]
    frame = next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])
    return f" ({frame.filename}:{frame.lineno}: {frame.line})"


def _definition(loss: CustomLoss) -> str:
    file, line = _place(loss)
    return f" ({file}:{line})" if file else ""


def _place(loss: CustomLoss) -> tuple[str, int]:
    """Return the file and the line where the function is defined; ("", 0) if unknown."""
    function = inspect.unwrap(loss.own.function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)
