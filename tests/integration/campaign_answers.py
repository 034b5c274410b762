"""Who answers the samples of a campaign: a judge, or an environment of several turns; and what it must have said."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bapo_megatron.config.schema import Config
from bapo_megatron.rewards import RewardScorer
from bapo_megatron.rewards.environments import EnvironmentSpec, StepAnswer, TurnJson
from bapo_megatron.rewards.verdicts import Verdict
from bapo_megatron.rewards.worker_pool import EnvironmentProcesses
from bapo_megatron.rollout.drivers import Driver, JudgeOnce, StepDriver
from bapo_megatron.rollout.turn_tokens import TurnTokens
from bapo_megatron.types import Ended, Given, NeedsEnvironment, Sample
from tests.distributed import HANG_S
from tests.integration.campaign_environment import FAILURES, NUM_TURNS, kind_of, said

BAD_RESPONSES = {"2.1": "hang", "5.0": "crash", "13.2": "hang", "14.3": "crash"}  # in each leg, by sample
MAX_ANSWER_TOKENS = 6
MAX_TURN_TOKENS = 8
STOP = ","  # ends a turn, besides the end of a sequence


class Answers(Protocol):
    """Source of the answers of all legs."""

    stop_token_ids: tuple[int, ...]
    max_turn_tokens: int | None
    ended: dict[str, Sample]  # samples of the leg that a driver has ended one by one

    def driver(self, max_response_tokens: int) -> Driver:
        """Return the driver of a new leg."""
        ...

    def hits(self) -> Counter[str]:
        """Return how many failures of each kind happened so far."""
        ...

    def check(self, sample: Sample) -> None:
        """Check what a sample was given, and its end."""
        ...

    def close(self) -> None: ...


class Judge:
    """A judge that hangs on some responses, and kills its process on others."""

    max_turn_tokens = None

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.ended: dict[str, Sample] = {}
        self.stop_token_ids = (tokenizer.eos_token_id,)
        self._tokenizer = tokenizer
        kind = "tests.integration.campaign_judge:judge"
        reward = config.reward.model_copy(update={"kind": kind, "timeout_s": HANG_S})
        self._scorer = RewardScorer(config.model_copy(update={"reward": reward}))

    def driver(self, max_response_tokens: int) -> Driver:
        def judge(samples: Sequence[Sample]) -> list[Verdict]:
            texts = self._tokenizer.batch_decode([s.sampled_ids.tolist() for s in samples], skip_special_tokens=True)
            return self._scorer.verdicts(
                [(s.prompt, BAD_RESPONSES.get(s.sample_id, text)) for s, text in zip(samples, texts, strict=True)]
            )

        return JudgeOnce(judge)

    def hits(self) -> Counter[str]:
        return Counter({"judge: hang": self._scorer.num_timeouts, "judge: crash": self._scorer.num_errors})

    def check(self, sample: Sample) -> None:
        assert not sample.num_given_tokens
        assert not isinstance(sample.need, Ended) or sample.reward is not None

    def close(self) -> None:
        self._scorer.close()


class Turns:
    """The environment of `campaign_environment`, in worker processes; a plain function in every second leg."""

    max_turn_tokens = MAX_TURN_TOKENS

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.ended: dict[str, Sample] = {}
        self.stop_token_ids = (tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(STOP))
        self._tokenizer = tokenizer
        self._tokens = TurnTokens(tokenizer, len(tokenizer))
        self._asked: Counter[str] = Counter()
        self._max_response_tokens = 0
        self._environments = [
            EnvironmentProcesses(
                EnvironmentSpec(f"tests.integration.campaign_environment:{name}", HANG_S, 4 << 30), concurrency=4
            )
            for name in ("step", "astep")
        ]

    async def step(self, turn: TurnJson, state: Any) -> StepAnswer:
        """Answer a turn, as the environment of this leg."""
        answer = await self._environments[0].step(turn, state)
        self._asked[kind_of({**turn})] += 1
        return answer

    deadline_s = HANG_S

    def driver(self, max_response_tokens: int) -> Driver:
        self.ended, self._max_response_tokens = {}, max_response_tokens
        self._environments.reverse()
        return _Watched(
            self,
            self._tokens.encode,
            self._tokens.decode,
            max_response_tokens=max_response_tokens,
            max_answer_tokens=MAX_ANSWER_TOKENS,
            max_turns=NUM_TURNS + 1,
        )

    def hits(self) -> Counter[str]:
        return Counter({f"environment: {kind}": self._asked[kind] for kind in (*FAILURES, "long")})

    def check(self, sample: Sample) -> None:
        """Ask the environment's function about each turn again; compare words, state, rewards and end."""
        (trajectory,), state = sample.trajectories, None
        rewards: list[float] = []
        given = [s.token_ids.tolist() for s in trajectory.segments[1:] if isinstance(s.origin, Given)]
        turns = [ids.tolist() for ids in trajectory.turns]
        assert len(turns) - len(given) in (0, 1)
        for number, token_ids in enumerate(turns, 1):
            turn = self._turn(sample, number, token_ids)
            kind, is_answered = kind_of(turn), number <= len(given)
            if not is_answered and not isinstance(sample.need, Ended):
                assert isinstance(sample.need, NeedsEnvironment) or turn["end"] == "length", "it needs its turn's end"
                continue
            if kind in FAILURES:
                assert number == len(turns)
                assert isinstance(sample.need, Ended)
                expected = ("failed", None) if kind == "failed" else (turn["end"], sum(rewards))
                assert (sample.need.reason, sample.reward) == expected
                assert sample.need.problem == ("timeout" if kind == "hang" else "error"), sample.need.message
                return
            answer = said(turn, state)
            if kind != "end":
                state = answer["state"]
                rewards.append(answer["reward"])
            if is_answered:
                words = self._tokenizer.convert_tokens_to_ids(list(answer["text"]))
                assert given[number - 1] == words[:MAX_ANSWER_TOKENS], f"{sample.sample_id}: turn {number} of {turn}"
            elif kind == "end":
                assert sample.finish_reason == turn["end"]
                rewards += answer["reward"].values()
            else:
                assert (sample.finish_reason, sample.num_sampled_tokens) == ("length", self._max_response_tokens)
        assert sample.state == state
        if isinstance(sample.need, Ended):
            assert sample.reward == sum(rewards)

    def close(self) -> None:
        for environment in self._environments:
            environment.close()

    def _turn(self, sample: Sample, number: int, token_ids: list[int]) -> dict[str, Any]:
        of = sample.prompt
        return {
            "prompt": of.text,
            "answer": of.answer,
            "source": of.source,
            "number": number,
            "text": self._tokenizer.decode(token_ids, skip_special_tokens=True),
            "token_ids": token_ids,
            "end": "stop" if token_ids[-1] in self.stop_token_ids else "length",
        }


class _Watched(StepDriver):
    """A driver that keeps the samples that it has ended, because groups without enough rewards vanish."""

    async def advance(self, samples: Sequence[Sample]) -> list[Sample]:
        found = await super().advance(samples)
        assert isinstance(self.environment, Turns)
        self.environment.ended |= {s.sample_id: s for s in found if isinstance(s.need, Ended)}
        return found


MakeAnswers = Callable[[Config, Any], Answers]
