"""How many tokens a cut (`rollout.top_p`) keeps at each place of responses: the size of a stream that replays it.

    python -m benchmarks.kept_tokens [MODEL_FOLDER]    (default: models/SmolLM2-135M-Instruct)

No speed, and nothing to compare with: responses of a chat model at temperature 1, and the fewest likeliest tokens whose
probabilities sum to at least `top_p`.
"""

import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUESTIONS = (
    "A farmer has 12 cows and sells 5. How many are left? Explain step by step.",
    "Write a short story about a fox and a river.",
    "What is 17 * 23? Think step by step.",
    "Explain why the sky is blue.",
)
NUM_SAMPLES, RESPONSE_TOKENS = 4, 96
ID_BYTES = 4


@torch.no_grad()
def main(folder: str) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    turns = [[{"role": "user", "content": question}] for question in QUESTIONS * NUM_SAMPLES]
    texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    prompts = tokenizer(texts, return_tensors="pt", padding=True)
    num_given = prompts["input_ids"].shape[1]
    sampled: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_new_tokens": RESPONSE_TOKENS,
    }
    token_ids_SL = model.generate(**prompts, **sampled)
    response_SL = token_ids_SL[:, num_given:]
    mask_SL = torch.cat([prompts["attention_mask"], torch.ones_like(response_SL)], dim=1)
    logits_SLV = model(token_ids_SL, attention_mask=mask_SL).logits[:, num_given - 1 : -1]
    probs_RV = logits_SLV[response_SL != tokenizer.pad_token_id].softmax(-1)
    sums_RV = probs_RV.sort(-1, descending=True).values.cumsum(-1)
    print(f"{len(sums_RV)} sampled tokens")
    for top_p in (0.9, 0.95, 0.99):
        num_kept_R = (sums_RV < top_p).sum(-1) + 1.0
        median, most = (float(num_kept_R.quantile(q)) for q in (0.5, 0.99))
        mean = float(num_kept_R.mean())
        kept = f"mean {mean:.0f}, median {median:.0f}, of 99 % at most {most:.0f}"
        print(f"top_p {top_p}: {kept}; {ID_BYTES * mean:.0f} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["models/SmolLM2-135M-Instruct"])
