"""BAPO from sampling to update, in plain torch. Read it from top to bottom, and run it: `python one_file.py`.

A tiny transformer learns to write three digits backwards. Nobody shows it an answer: it samples some, and a judge says
how good each one is. What the package adds to this is scale: other processes sample, the model is split over GPUs,
and a crash loses nothing. The mathematics is the same; `tests/unit/test_one_file.py` compares both.

Shape legend: B responses, P tokens of a prompt, L tokens of a response, V tokens of the vocabulary, G responses to one
prompt.
"""

import itertools
import random

import torch
from torch import Tensor, nn

# ---- the task ----

NUM_DIGITS, PROMPT_LENGTH = 8, 3
END = NUM_DIGITS  # the token that ends a response
VOCAB_SIZE = NUM_DIGITS + 1
MAX_TOKENS = PROMPT_LENGTH + 1


def prompts() -> tuple[Tensor, Tensor]:
    """Return the prompts to train on, and others to evaluate on, [., P]. The policy never trains on the second part."""
    every = list(itertools.product(range(NUM_DIGITS), repeat=PROMPT_LENGTH))
    random.Random(0).shuffle(every)
    return torch.tensor(every[64:]), torch.tensor(every[:64])


def judge(prompt_BP: Tensor, response_BL: Tensor) -> Tensor:
    """Return the share of places in which a response is right, [B]. Example: 1 2 3 -> 3 2 1 END has reward 1."""
    end_B1 = torch.full((len(prompt_BP), 1), END)
    answer_BL = torch.cat([prompt_BP.flip(1), end_B1], 1)
    return (response_BL == answer_BL).double().mean(1)


# ---- the policy ----


class Policy(nn.Module):
    """A causal transformer: logits of the next token at each place."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCAB_SIZE, width)
        self.place = nn.Embedding(PROMPT_LENGTH + MAX_TOKENS, width)
        # No dropout: the same tokens must have the same log-probs while sampling and while learning.
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)  # what a token must not see
        return self.head(self.blocks(self.token(tokens) + self.place(torch.arange(length)), mask=later))


@torch.no_grad()
def sample(policy: Policy, prompt_BP: Tensor, *, greedy: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Continue each prompt. Return tokens, their log-probs in nats, and a mask of the tokens up to END, all [B, L]."""
    tokens, log_probs, mask = prompt_BP, [], []
    is_open_B = torch.ones(len(prompt_BP), dtype=torch.bool)
    for _ in range(MAX_TOKENS):
        log_probs_BV = policy(tokens)[:, -1].log_softmax(-1)
        next_B1 = log_probs_BV.argmax(1, True) if greedy else log_probs_BV.exp().multinomial(1)
        tokens = torch.cat([tokens, next_B1], 1)
        # These log-probs are the denominator of the ratio below. They are kept with the tokens, because the weights
        # that sampled them are gone by the time the learner reads them.
        log_probs.append(log_probs_BV.gather(1, next_B1)[:, 0])
        mask.append(is_open_B)
        is_open_B = is_open_B & (next_B1[:, 0] != END)  # END itself was sampled, so it is trained; what follows is not
    return tokens[:, prompt_BP.shape[1] :], torch.stack(log_probs, 1), torch.stack(mask, 1)


def score(policy: Policy, prompt_BP: Tensor, response_BL: Tensor) -> Tensor:
    """Return the log-probs of given responses at the current weights, with gradient, [B, L]."""
    logits = policy(torch.cat([prompt_BP, response_BL], 1))
    # The logits at a place predict the next token, so they are shifted by one.
    before = logits[:, prompt_BP.shape[1] - 1 : -1]
    return before.log_softmax(-1).gather(2, response_BL[:, :, None])[:, :, 0]


# ---- the algorithm ----


def group_advantages(reward_G: Tensor) -> Tensor:
    """Return how much better than its group each response is, in standard deviations, [G].

    The other responses to the same prompt are the baseline, so no value model is needed. If all rewards are equal,
    there is nothing to learn, and the advantages are exactly 0.

    Example: rewards 1, 0, 0, 1 -> about 0.87, -0.87, -0.87, 0.87
    """
    if reward_G.max() == reward_G.min():
        return torch.zeros_like(reward_G)
    return (reward_G - reward_G.mean()) / (reward_G.std() + 1e-6)


TARGET = 0.5  # the share of the policy gradient that should come from tokens with a positive advantage
LOW_START, LOW_STOP, LOW_STEP = 0.6, 0.9, 0.02
HIGH_START, HIGH_STOP, HIGH_STEP = 1.2, 3.0, 0.05


def find_bounds(ratio: Tensor, advantage: Tensor) -> tuple[float, float]:
    """Search the clip bounds of one update, over all of its trained tokens: Algorithm 1 of arXiv 2510.18927.

    The paper's reason: with fixed bounds, bad responses often outweigh good ones, because they have more tokens, and
    because a good token that was unlikely soon reaches the upper bound. The policy then loses its entropy, and stops
    exploring. So bounds move until good tokens contribute enough: first the upper bound lets more of them in,
    then the lower bound drops bad tokens, whose probability has fallen already.
    """
    ratio, mass = ratio.double(), (ratio.double() * advantage.double()).abs()
    low, high, num_low, num_high = LOW_START, HIGH_START, 0, 0
    while True:
        positive = mass[(advantage > 0) & (ratio < high)].sum()
        negative = mass[(advantage < 0) & (ratio > low)].sum()
        share = positive / (positive + negative)
        # Nothing contributes: the share is nan, and no bound moves. The factor forgives rounding: while no ratio has
        # moved, both sides are often equal.
        if not share < TARGET * (1 - 1e-5):
            return low, high
        next_high = round(HIGH_START + (num_high + 1) * HIGH_STEP, 10)
        next_low = round(LOW_START + (num_low + 1) * LOW_STEP, 10)
        if next_high <= HIGH_STOP:
            high, num_high = next_high, num_high + 1
        elif next_low <= LOW_STOP:
            low, num_low = next_low, num_low + 1
        else:
            return low, high


def bapo_loss(log_probs: Tensor, behaviour: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """Return -min(r A, clip(r, low, high) A) of each token, with r the ratio to the policy that sampled it.

    A good token above `high` and a bad one below `low` have no gradient: they have moved far enough for one update. A
    good token that has become less likely keeps its gradient, and so does a bad one that has become more likely.
    """
    ratio = (log_probs - behaviour).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


# ---- the loop ----

PROMPTS_PER_STEP, SAMPLES_PER_PROMPT, UPDATES_PER_STEP = 32, 8, 4


def step(policy: Policy, optimizer: torch.optim.Optimizer, prompt_BP: Tensor) -> tuple[float, float, float]:
    """Sample, judge and learn once. Return the mean reward and the last update's bounds."""
    prompt_BP = prompt_BP.repeat_interleave(SAMPLES_PER_PROMPT, 0)
    response_BL, behaviour_BL, mask_BL = sample(policy, prompt_BP)
    reward_B = judge(prompt_BP, response_BL)
    # One advantage for a whole response: nobody knows which of its tokens made it good.
    advantage_B = torch.cat([group_advantages(group) for group in reward_B.split(SAMPLES_PER_PROMPT)])
    advantage_BL = advantage_B.float()[:, None].expand_as(behaviour_BL)

    # Several updates from one batch: from the second on, the weights are not those that sampled. This is why ratios
    # and bounds exist. In the first update every ratio is 1, and nothing is clipped.
    for part in torch.randperm(len(prompt_BP)).chunk(UPDATES_PER_STEP):
        log_probs = score(policy, prompt_BP[part], response_BL[part])[mask_BL[part]]
        behaviour, advantage = behaviour_BL[part][mask_BL[part]], advantage_BL[part][mask_BL[part]]
        low, high = find_bounds((log_probs.detach() - behaviour).exp(), advantage)
        # One mean over all tokens of the update, not a mean of each response's mean: each token counts the same.
        loss = bapo_loss(log_probs, behaviour, advantage, low, high).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return reward_B.mean().item(), low, high


def evaluate(policy: Policy, held_out: Tensor) -> float:
    """Return the mean reward of the likeliest responses to prompts that were never trained on."""
    response, _, _ = sample(policy, held_out, greedy=True)
    return judge(held_out, response).mean().item()


def main(num_steps: int = 60) -> list[float]:
    """Train, and print what happens. Return the held-out rewards: before the first step, and after every tenth."""
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)
    training, held_out = prompts()
    rewards = [evaluate(policy, held_out)]
    print(f"before: held-out reward {rewards[0]:.2f}")
    for number in range(1, num_steps + 1):
        drawn = training[torch.randperm(len(training))[:PROMPTS_PER_STEP]]
        reward, low, high = step(policy, optimizer, drawn)
        if number % 10 == 0:
            rewards.append(evaluate(policy, held_out))
            print(f"step {number}: reward {reward:.2f}, held-out {rewards[-1]:.2f}, bounds [{low:.2f}, {high:.2f}]")
    return rewards


if __name__ == "__main__":
    main()
