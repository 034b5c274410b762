"""Products for a chat model: data.source = "chat_calculator:products", environment.kind = "chat_calculator:step".

A turn that ends with a product, "37*46=", is a question to the calculator, which answers as the chat's tool. Any other
turn is the answer. chat_calculator.toml trains SmolLM2-135M-Instruct, which cannot multiply such numbers itself:

    PYTHONPATH=docs/examples bapo train docs/examples/chat_calculator.toml
"""

import random
import re

EXAMPLE = [
    {"role": "system", "content": "Use the calculator."},
    {"role": "user", "content": "12*34?"},
    {"role": "assistant", "content": "12*34="},
    {"role": "tool", "content": "408"},
    {"role": "assistant", "content": "408"},
]


def products(num=4096, seed=0):
    rng = random.Random(f"products/{seed}")
    for _ in range(num):
        left, right = rng.randrange(10, 100), rng.randrange(10, 100)
        question = {"role": "user", "content": f"What is {left} times {right}?"}
        yield {"messages": [*EXAMPLE, question], "answer": str(left * right)}


def step(turn, state):
    if turn["text"].endswith("="):
        call = re.search(r"(\d{1,4}) ?\* ?(\d{1,4}) ?=$", turn["text"])
        words = str(int(call[1]) * int(call[2])) if call else "Write a product, such as 12*34="
        return {"messages": [{"role": "tool", "content": words}]}
    numbers = re.findall(r"\d+", turn["text"].replace(",", ""))
    return {"reward": float(numbers[-1:] == [turn["answer"]])}
