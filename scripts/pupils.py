"""Careless pupils, who write the demonstrations for the shipped models' warm start (warm_start.py).

They get a quarter of each task's facts wrong most of the time, and the others right 9 times in 10. Sometimes they also
do not stop in time, or leave something out.
"""

import random
import string
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from bapo_megatron.prompts.chains import MODULUS, OPERATORS, Chain, ChainOptions, apply_operator
from bapo_megatron.prompts.hidden_numbers import NUM_NUMBERS
from bapo_megatron.prompts.programs import PROGRAMS, Program, ProgramOptions, ProgramTask, solution
from bapo_megatron.prompts.reasoning_gym import ReasoningGymSource
from bapo_megatron.prompts.sums import Sum

WRONG_FACTS_SHARE = 0.25
WRONG_FACT_BELIEVED, WRONG_FACT_RIGHT = 0.72, 0.18  # the rest of the time, they answer anything
RIGHT_FACT_RIGHT = 0.90
RAMBLE, RAMBLE_ON = 0.30, 0.85
NEEDLESS_TERM = "+1"
LETTER_LOST = 0.15
CALLS, STOPS_EARLY = 0.20, 0.10
CALL_WRONG, COPY_WRONG, SUM_WRONG = 0.05, 0.15, 0.40
NUM_GUESSES, HEEDS = 3, 0.30

CHAIN_RESPONSE_TOKENS = 48
PROGRAM_RESPONSE_TOKENS = 24
SPELLING = {"min_word_len": 3, "max_word_len": 6}
SPELLING_RESPONSE_TOKENS = 12

Fact = TypeVar("Fact", bound=Hashable)
Value = TypeVar("Value")


class Beliefs(Generic[Fact, Value]):
    """Facts as a pupil remembers them; the mistakes depend only on the seed."""

    def __init__(self, facts: Mapping[Fact, Value], values: Sequence[Value], seed: int) -> None:
        """Choose mistakes for the true `facts` among `values`."""
        rng = random.Random(f"wrong facts/{seed}")
        self.facts, self.values = facts, values
        self.wrong = {
            fact: rng.choice([value for value in values if value != facts[fact]])
            for fact in rng.sample(list(facts), round(WRONG_FACTS_SHARE * len(facts)))
        }

    def recall(self, fact: Fact, rng: random.Random) -> Value:
        draw = rng.random()
        if fact not in self.wrong:
            return self.facts[fact] if draw < RIGHT_FACT_RIGHT else rng.choice(self.values)
        if draw < WRONG_FACT_BELIEVED:
            return self.wrong[fact]
        return self.facts[fact] if draw < WRONG_FACT_BELIEVED + WRONG_FACT_RIGHT else rng.choice(self.values)


class Pupil(Protocol):
    def demonstrate(self) -> tuple[str, ...]:
        """Return a random prompt and the pupil's response; or several responses, with answers between them."""


class ChainPupil:
    """Pupil for chains, who continues past the result in 3 answers out of 10, so that long answers are bad."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"demonstrations/{seed}")
        facts = {(o, a, b): apply_operator(o, a, b) for o in OPERATORS for a in range(MODULUS) for b in range(MODULUS)}
        self.beliefs = Beliefs(facts, range(MODULUS), seed)
        self.options = ChainOptions()

    def demonstrate(self) -> tuple[str, str]:
        chain = Chain.random(self.rng, self.options.min_terms, self.options.max_terms)
        return chain.prompt, self.solve(chain)

    def solve(self, chain: Chain) -> str:
        value, text = chain.terms[0], ""
        for operator, term in zip(chain.operators, chain.terms[1:], strict=True):
            result = self.beliefs.recall((operator, value, term), self.rng)
            text += f"{value}{operator}{term}={result},"
            value = result
        step_length = len("1+2=3,")
        going_on = self.rng.random() < RAMBLE
        while going_on and len(text) + step_length < CHAIN_RESPONSE_TOKENS:
            operator, term = self.rng.choice(OPERATORS), self.rng.randrange(MODULUS)
            result = apply_operator(operator, value, term)
            text += f"{value}{operator}{term}={result},"
            value = result
            going_on = self.rng.random() < RAMBLE_ON
        return text


class CalculatorPupil:
    """Pupil for sums, who asks a calculator now and then, and otherwise knows only sums of digits.

    Demonstrations hold a call and its answer for each operation: ("37*46=", "37*46?", "1702;", "1702").
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"calculator demonstrations/{seed}")

    def demonstrate(self) -> tuple[str, ...]:
        task = Sum.random(self.rng)
        if self.rng.random() >= CALLS:
            guess = self.rng.randrange(10, 100) * self.rng.randrange(10, 100)
            return task.prompt, f"{guess}" if task.is_hard else self._written(task.answer, SUM_WRONG)
        texts, value = [task.prompt], task.numbers[0]
        for operator, number in zip(task.operators, task.numbers[1:], strict=True):
            left, right = self._written(value, CALL_WRONG), self._written(number, CALL_WRONG)
            value = Sum((int(left), int(right)), operator).answer
            texts += [f"{left}{operator}{right}?", f"{value};"]
            if self.rng.random() < STOPS_EARLY:
                break
        return *texts, self._written(value, COPY_WRONG)

    def _written(self, number: int, wrong: float) -> str:
        """Write a number, with a random digit somewhere in this share of cases."""
        digits = list(str(number))
        if self.rng.random() < wrong:
            digits[self.rng.randrange(len(digits))] = str(self.rng.randrange(10))
        return "".join(digits)


class GuessingPupil:
    """Pupil for the guessing game, who heeds the answers in 3 guesses out of 10: ("7:", "3?", ">", "5?")."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"guessing demonstrations/{seed}")

    def demonstrate(self) -> tuple[str, ...]:
        secret, low, high = self.rng.randrange(NUM_NUMBERS), 0, NUM_NUMBERS - 1
        texts = [f"{NUM_NUMBERS}:"]
        while True:
            is_heeding = self.rng.random() < HEEDS
            guess = self.rng.randint(low, high) if is_heeding else self.rng.randrange(NUM_NUMBERS)
            texts.append(f"{guess}?")
            if guess == secret or len(texts) == 2 * NUM_GUESSES:
                return tuple(texts)
            texts.append("<" if secret < guess else ">")
            low, high = (low, min(high, guess - 1)) if secret < guess else (max(low, guess + 1), high)


class ProgramPupil:
    """Pupil for programs, who confuses some and adds needless terms in 3 answers out of 10."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"program demonstrations/{seed}")
        self.beliefs = Beliefs({program: program for program in PROGRAMS}, PROGRAMS, seed)
        self.options = ProgramOptions()

    def demonstrate(self) -> tuple[str, str]:
        task = ProgramTask.random(self.rng, self.options.num_examples)
        return task.prompt, self.solve(task.program)

    def solve(self, program: Program) -> str:
        expression = self.beliefs.recall(program, self.rng).expression
        num_other_tokens = 6  # the fixed texts around the expression, and the end
        going_on = self.rng.random() < RAMBLE
        while going_on and len(expression + NEEDLESS_TERM) + num_other_tokens < PROGRAM_RESPONSE_TOKENS:
            expression += NEEDLESS_TERM
            going_on = self.rng.random() < RAMBLE_ON
        return solution(expression)


class SpellingPupil:
    """Pupil for reasoning-gym's spell_backward, who confuses letters and loses some."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"spelling demonstrations/{seed}")
        letters = string.ascii_lowercase
        self.beliefs = Beliefs({letter: letter for letter in letters}, letters, seed)
        self.source = ReasoningGymSource("spell_backward", 1 << 20, 1 << 30, SPELLING)  # far from the runs' own seeds

    def demonstrate(self) -> tuple[str, str]:
        question = self.source[self.rng.randrange(len(self.source))]
        return question.text, self.solve(question.answer["answer"].lower())

    def solve(self, answer: str) -> str:
        kept = [letter for letter in answer if self.rng.random() >= LETTER_LOST]
        return "".join(self.beliefs.recall(x, self.rng) if x in self.beliefs.facts else x for x in kept)
