"""The site's page on benchmarks, from results.json, which `python -m benchmarks --output FILE.json` renews."""

import json
from pathlib import Path
from typing import Any

from benchmarks.row import TABLE_HEAD, Row

RESULTS = Path(__file__).with_name("results.json")
COMPARED = {  # group of rows -> what it compares
    "clip-bounds": """\
BAPO's search with one table and one all-reduce, against the literal loop of Algorithm 1 and the loop of the authors'
recipe (rewritten here). The loops read all tokens at every probe and reduce once per probe: one that stops early reads
the tokens twice, one that saturates reads them 52 times. Four ranks share this machine.""",
    "logprobs": """\
Log-probs, entropies and gradients from hidden states, in chunks of rows, against whole logits as in transformers and
verl, and against Megatron-Core's cross-entropy, which computes no entropy (neither does ours in that row). Ours
computes the logits twice so that it keeps none: with a small vocabulary it trades time for memory.""",
    "packing": """\
The same update with sequences packed and with each one padded to the longest; and the FLOPs of the data rank that all
others wait for, by plan.""",
    "train-step": """\
One update against transformers and torch's AdamW, which pad; and all forward passes before the backward passes, which
saves BAPO a scoring pass, against a separate pass.""",
    "scaling": """\
One update shared by 2 and 4 ranks against 1 rank: the ideal is the number of ranks, up to the number of cores. Also the
same number of tokens in longer sequences: the ideal is 1.""",
    "weight-sync": """\
A push, with pause, digests and comparison, against a raw broadcast of the same bytes (the ideal is 1), and against the
disk channel.""",
    "rollout": """\
A step of partial, over-sampled and overlapped rollouts against a synchronous one. Training is simulated by a wait of
half the synchronous rollout, as if on other devices. The case names the bound that decoding alone allows.""",
    "scheduler": """\
The scheduler's CPU time per response with 100, 1,000 and 10,000 of them active, against one that loops over all of
them.""",
    "slow-environment": """\
Steps of samples whose tool takes 0.5 s a turn, against the same steps with a tool that answers immediately: at 0.77,
the wait makes a step take 1.3 times as long.""",
    "replies": """\
Decoding and checking an engine's reply and turning it into samples, against json and loops over tokens.""",
    "checkpoint": """\
Shards of four ranks against all tensors through rank 0, and against torch.save on each rank, which checks and digests
nothing and whose files only the same layout can read; and how long training waits for a save in the background.""",
    "start-up": """\
`bapo demo train.num_steps=1` against one plain program with transformers that samples and updates once.""",
    "against-trl": """\
A whole step, the start and overlap against TRL's GRPOTrainer.""",
}
_HEAD = """\
# Benchmarks

Every row compares two ways to do the same work, in one run, on one machine. The two take turns, and a ratio is computed
per turn: **other / ours**, so above 1 ours is faster, or takes less memory. A row has the median of the turns, and the
middle half in parentheses. Results are compared in every turn, and a disagreement is an error. CPU seconds do not
depend on what else runs; other seconds are wall-clock time, and their ratios are only as good as the machine is quiet.
The load is a one-minute average, before and after. [Performance](performance.md) says what follows from the figures."""


def benchmarks_page() -> str:
    """Return the page on the committed results as Markdown."""
    return page(json.loads(RESULTS.read_text(encoding="utf-8")))


def page(result: dict[str, Any]) -> str:
    """Return a page on what `python -m benchmarks --output FILE` wrote."""
    names = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    host = result["machine"]
    command = "python -m benchmarks --quick" if result["quick"] else "python -m benchmarks"
    took = f"{result['seconds'] / 60:.0f} minutes"
    measured = f"{host['cpu']}, {host['cores']} cores, one thread per process; {names}; {took}"
    parts = [_HEAD, f"`{command}`, {result['date'][:10]}: {measured}."]
    for name in dict.fromkeys(row["row"] for row in result["rows"]):
        fields = [{k: v for k, v in row.items() if k != "row"} for row in result["rows"] if row["row"] == name]
        rows = [str(Row(**each)) for each in fields]
        parts += [f"## {name}", COMPARED[name], "\n".join([TABLE_HEAD, *rows])]
    missing = [f"- {x['row']}, {x['case']}: {x['reason']}." for x in result["left_out"]]
    missing += [f"- {x['row']}: it failed ({x['error']})." for x in result["failed"]]
    if missing:
        parts += ["## Left out", "\n".join(missing)]
    return "\n\n".join(parts) + "\n"
