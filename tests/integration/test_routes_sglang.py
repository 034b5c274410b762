"""A run on real SGLang that replays routes, overlapped and in two turns: each row is the choice of the weights of its
time."""

import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bapo_megatron.assets import shipped_model_path
from bapo_megatron.convert import hf_folder
from bapo_megatron.engines.key import KEY_VARIABLE
from bapo_megatron.engines.start import running_engines
from bapo_megatron.hf.facts import ModelFacts
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Placement
from bapo_megatron.rollout.recorded import read_groups
from bapo_megatron.runtime.files import read_jsonl
from bapo_megatron.tokens import TokenStream
from bapo_megatron.types import Sample, Sampled, Trajectory
from tests.hf_models import save_model
from tests.integration.killable import Attempt, small_run

KEY = "the-key-of-this-run"
MAX_AGE, NUM_STEPS = 4, 5  # the last step must train what began with the first weights
NUM_HELD, NUM_VERSIONS = 2, 3
ROUNDING = 1e-5  # experts whose shares differ by less may change places
SETTINGS = (
    "data.source=bapo_megatron.prompts.sums:sums",
    "environment.kind=tests.unit.step_functions:talk",
    "environment.options={num_answers=1}",
    "environment.max_turn_tokens=8",
    "rollout.engine=sglang",
    "rollout.overlap=true",
    f"rollout.max_staleness={MAX_AGE}",
    "rollout.record=true",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=4",
    "rollout.groups_in_flight=6",
    "rollout.max_concurrent_requests=24",
    "rollout.tokens_per_round=4",
    "rollout.max_response_tokens=16",
    "rollout.max_restarts=0",
    "model.replay_routes=true",
    f"train.num_steps={NUM_STEPS}",
    "train.minibatches_per_step=1",
    "parallel.tensor=1",
    "parallel.data=2",
    "parallel.expert=2",
    "optimizer.lr=0.01",
    "optimizer.warmup_updates=0",
    "train.entropy_coef=0.5",  # moves the weights, whatever the rewards
)


def save_mixture(folder: Path) -> None:
    """Save a random mixture with the tool demo's tokenizer, which has digits and the environment's semicolon."""
    sizes = {"hidden_size": 48, "head_dim": 16, "moe_intermediate_size": 32, "num_hidden_layers": 3}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    save_model("qwen3-moe-128-experts", folder, vocab_size=24, eos_token_id=1, pad_token_id=0, **sizes, **experts)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped_model_path("tool") / file, folder)


def prepare() -> None:
    """Let the first prompts' samples take one piece from each of three weight versions, unless the trainer waits."""
    from bapo_megatron.rollout.continuous import ContinuousSampling

    os.environ[KEY_VARIABLE] = KEY
    enqueue = ContinuousSampling._enqueue

    def is_due(self: ContinuousSampling, sample: Sample) -> bool:
        seen = {*sample.versions}
        is_free = sample.prompt.prompt_id >= NUM_HELD or len(seen) >= NUM_VERSIONS or self.version not in seen
        return is_free or self._book.is_urgent(sample, self.next_version)

    def enqueue_due(self: ContinuousSampling, samples: Iterable[Sample]) -> None:
        enqueue(self, [sample for sample in samples if is_due(self, sample)])

    ContinuousSampling._enqueue = enqueue_due  # type: ignore[method-assign]


def models_of(run: Path, mixture: Path) -> Iterator[PreTrainedModel]:
    """Yield a model for each weight version, with the weights that the engine got."""
    yield AutoModelForCausalLM.from_pretrained(mixture).eval()
    for step in range(1, NUM_STEPS + 1):
        with hf_folder(run / "checkpoints" / f"step-{step:06d}") as (folder, version):
            assert version == step
            yield AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def passed(model: PreTrainedModel, ids: list[int], rows_TLK: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each token's log-prob after those before it, and the routers' logits, [T, layers, experts].

    Args:
        rows_TLK: the experts that the layers take, with the router's shares, instead of its own choice.
    """
    logits: list[Tensor] = []

    def see(router: torch.nn.Module, args: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        logits.append(output[0])
        if rows_TLK is None:
            return None
        chosen_TK = rows_TLK[:, len(logits) - 1]
        return output[0], output[0].gather(1, chosen_TK).softmax(-1), chosen_TK

    hooks = [layer.mlp.gate.register_forward_hook(see) for layer in model.model.layers]
    log_probs_TV = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    for hook in hooks:
        hook.remove()
    log_probs_T = torch.cat([torch.zeros(1), log_probs_TV.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]])
    return log_probs_T, torch.stack(logits, 1)


def are_others(logits_TLX: Tensor, rows_TLK: Tensor) -> Tensor:
    """Return where the recorded experts are not the best ones, up to rounding: bool [T, layers]."""
    assert (rows_TLK.sort(-1).values.diff() > 0).all(), "an expert is recorded twice"
    best_TLK = logits_TLX.topk(rows_TLK.shape[-1]).values
    return logits_TLX.gather(-1, rows_TLK).amin(-1) < best_TLK[..., -1] - ROUNDING


def rows_by_version(trajectory: Trajectory, routes: TokenStream) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the version that read some tokens, the first one's place, and their rows [tokens, layers, chosen]."""
    version, end = None, trajectory.num_tokens
    for segment in reversed(trajectory.segments):
        start = end - segment.num_tokens
        if isinstance(segment.origin, Sampled):
            version = segment.origin.version
        assert version is not None, "a trained sample ends with a sampled token"
        first = max(start, 1)  # no token precedes the first one
        yield version, first - 1, torch.from_numpy(segment.rows[routes][first - start :].copy()).long()
        end = start


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_every_row_of_a_run_is_the_choice_of_the_weights_of_its_time(tmp_path: Path) -> None:
    mixture = tmp_path / "mixture"
    save_mixture(mixture)
    config = small_run(tmp_path, "run", f"model.path={mixture}", *SETTINGS)
    with (
        running_engines(resolve(config, mixture), tmp_path, Placement(num_servers=1).on(), KEY) as (url,),
        Attempt(config, SimpleNamespace(url=url), prepare=prepare) as attempt,
    ):
        attempt.finish()
        run = attempt.run_dir
    (routes,) = ModelFacts.of(mixture).returned_streams({"routes"})
    groups = [g for step in range(1, NUM_STEPS + 1) for g in read_groups(run / "rollouts", step, [routes])]
    trajectories = [t for group in groups for sample in group.samples for t in sample.trajectories]
    assert all(len(trajectory.turns) == 2 for trajectory in trajectories)
    assert max(len({origin.version for origin, _ in t.sampled_segments}) for t in trajectories) >= NUM_VERSIONS
    models = [*models_of(run, mixture)]
    num_rows = num_different = 0
    errors: dict[str, list[Tensor]] = {"own": [], "replayed": [], "replayed after others": []}
    for trajectory in trajectories:
        ids = trajectory.token_ids.tolist()
        passes = [passed(model, ids) for model in models]
        rows_TLK = passes[0][1].topk(routes.shape[1]).indices  # the last token's own row is never read
        versions_T = torch.full((len(ids),), -1)
        for version, start, rows in rows_by_version(trajectory, routes):
            here = slice(start, start + len(rows))
            rows_TLK[here], versions_T[here] = rows, version
            is_other_TL = [are_others(logits_TLX[here], rows) for _, logits_TLX in passes]
            assert not is_other_TL[version].any(), "the routers of this version choose other experts"
            num_rows += len(rows)
            num_different += int(is_other_TL[version - 1 if version else 1].any(1).sum())
        start = 0
        for segment in trajectory.segments:
            here, start = slice(start, start + segment.num_tokens), start + segment.num_tokens
            if isinstance(origin := segment.origin, Sampled):
                served_T = torch.from_numpy(origin.behaviour_logprobs.copy())
                replayed_T, _ = passed(models[origin.version], ids, rows_TLK)
                is_one = bool((versions_T[: here.stop - 1] == origin.version).all())
                errors["own"].append((passes[origin.version][0][here] - served_T).abs())
                errors["replayed" if is_one else "replayed after others"].append((replayed_T[here] - served_T).abs())
    assert num_different > num_rows / 5, "the versions must differ for this to mean much"
    found = {name: torch.cat(parts) for name, parts in errors.items()}
    print({name: (len(each), float(each.mean()), float(each.max())) for name, each in found.items()})
    assert max(found["own"].max(), found["replayed"].max()) < ROUNDING
    assert found["replayed after others"].max() > ROUNDING, "the server chose again for tokens of earlier versions"
    first, *_ = read_jsonl(run / "metrics.jsonl")
    assert first["mismatch/tokens"] > 0
    assert first["mismatch/logprob_max"] < ROUNDING, "in the first step, all rows are of the version that is trained"
