"""The site's page on layouts: the prose of layouts_page.md around the figures of tests/integration/layouts.json.

`python -m tests.integration.layouts` measures the figures again.
"""

import json
from pathlib import Path
from typing import Any

PROSE = Path(__file__).with_suffix(".md")
RESULTS = Path(__file__).parents[1] / "tests" / "integration" / "layouts.json"


def layouts_page() -> str:
    """Return the page as Markdown."""
    result = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = PROSE.read_text(encoding="utf-8").replace("<!-- date -->", result["date"])
    for name in ("rows", "rows_with_experts", "rows_with_linear_attention", "rows_with_both"):
        page = page.replace(f"<!-- {name} -->", table(result[name]))
    return page


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows of layouts.json as a table in Markdown."""
    models = list(rows[0]["models"])
    lines = [
        "| layout | processes | " + " | ".join(f"{m}: loss | gradient | norm" for m in models) + " | bounds |",
        "|---|---" + "|---|---|---" * len(models) + "|---|",
    ]
    for row in rows:
        cells = [f"{row['models'][m][name]:.1e}" for m in models for name in ("loss", "gradient", "norm")]
        same = "identical" if all(row["models"][m]["same_bounds"] for m in models) else "DIFFERENT"
        lines.append(" | ".join([f"| {row['layout']}", str(row["processes"]), *cells, f"{same} |"]))
    return "\n".join(lines)
