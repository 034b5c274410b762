"""environment.kind = "agent", environment.options = {command = ["python", "openai_agent.py"]}: three tries at a sum.

OPENAI_BASE_URL and OPENAI_API_KEY, which the client reads, lead to the policy that is trained. The descriptor
BAPO_REWARD_FD holds the answer and takes the reward.
"""

import json
import os
import re

import openai

client = openai.OpenAI()
task = json.loads(os.environ["BAPO_TASK"])
reward_fd = int(os.environ["BAPO_REWARD_FD"])
with open(reward_fd, closefd=False) as file:
    answer = json.loads(file.readline())
messages = [{"role": "user", "content": task["prompt"]}]


def ask():
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages, max_tokens=32)
    messages.append(reply.choices[0].message)
    return reply.choices[0].message.content


num_wrong = 0
while num_wrong < 3:
    numbers = re.findall(r"-?\d+", ask())
    if numbers[-1:] == [answer]:
        break
    num_wrong += 1
    messages.append({"role": "user", "content": "That is wrong. Try again."})

os.write(reward_fd, json.dumps({"reward": {"right": float(num_wrong < 3), "tries": -0.1 * num_wrong}}).encode())
