"""Write the table of docs/losses.md on selection by micro-batch: python scripts/write_selection_table.py."""

import random
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "losses.md"
NUM_RESPONSES, RESPONSE_TOKENS = 160, 128
MICRO_BATCHES = (1, 2, 4, 8)
_BEGIN, _END = "<!-- generated: selection -->", "<!-- end -->"


def filled_page(text: str) -> str:
    """Put the table between its marks on the page."""
    before, rest = text.split(_BEGIN)
    after = rest.partition(_END)[2]
    return f"{before}{_BEGIN}\n{table()}\n{_END}{after}"


def table() -> str:
    """Count what each number of micro-batches selects, and how much of it the update's own choice has too."""
    rng = random.Random(0)
    advantages, log_probs, entropies = [], [], []
    for _ in range(NUM_RESPONSES):  # an advantage for each response, and prompts of different difficulty
        advantage, difficulty = rng.gauss(0, 1), rng.uniform(0.5, 2)
        for _ in range(RESPONSE_TOKENS):
            advantages.append(advantage)
            log_probs.append(-4 * rng.random() ** 3)
            entropies.append(difficulty * rng.random() ** 3)
    tokens = range(len(advantages))
    lines = [
        f"| | share | of the update | {' | '.join(map(_micro_batches, MICRO_BATCHES))} |",
        f"|---|---|---|{'---|' * len(MICRO_BATCHES)}",
    ]
    for name, share in (("KL-Cov", 2e-4), ("KL-Cov", 2e-3), ("top entropy", 0.2)):

        def chosen(part: Sequence[int], name: str = name, share: float = share) -> set[int]:
            """Return the tokens that a part selects by its own means, at least one."""
            mean_a, mean_l = (sum(column[i] for i in part) / len(part) for column in (advantages, log_probs))

            def score(i: int) -> float:
                return (advantages[i] - mean_a) * (log_probs[i] - mean_l) if name == "KL-Cov" else entropies[i]

            return set(sorted(part, key=score, reverse=True)[: max(1, int(share * len(part)))])

        exact, cells = chosen(tokens), []
        for number in MICRO_BATCHES:
            size = len(tokens) // number
            found = set().union(*(chosen(tokens[start : start + size]) for start in range(0, len(tokens), size)))
            cells.append(f"{len(found):,}, right {len(found & exact):,}")
        lines.append(f"| {name} | {share:g} | {len(exact):,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _micro_batches(number: int) -> str:
    return f"{number} micro-batch{'es' if number > 1 else ''}"


if __name__ == "__main__":
    PAGE.write_text(filled_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
