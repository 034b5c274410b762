"""House rules that import-linter cannot state (`lint-imports` checks the layers, see pyproject.toml)."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "bapo_megatron"
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_the_documented_rooms_are_the_layers_and_the_folders() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [{room.strip() for room in layer.split("|")} for layer in contracts[0]["layers"]]
    floor_of = {room: floor for floor, rooms in enumerate(layers) for room in rooms}

    text = (ROOT / "docs" / "architecture.md").read_text().split("\n\n")[2]
    sentences_from = text.splitlines()[0].index("the Python interface")
    documented = [room for line in text.splitlines() for room in line[:sentences_from].split()]
    assert all(line[sentences_from - 1] == " " and line[sentences_from:] for line in text.splitlines())
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert {room.rstrip("/") for room in documented if room.endswith("/")} == folders
    assert {room.rstrip("/") for room in documented} == floor_of.keys() - {"__main__"}
    floors = [floor_of[room.rstrip("/")] for room in documented]
    assert floors == sorted(floors), "from top to bottom"


def test_one_file_of_the_framework_asks_for_parallel_state() -> None:
    asking = [name(f) for f in FILES if any("parallel_state" in m or m.endswith(".mpu") for m in imported(f))]
    assert [file for file in asking if not file.startswith("plugins/")] == ["learner/parallel.py"]
    assert [file for file in asking if file.startswith("plugins/")] == ["plugins/miles.py", "plugins/ranks.py"]


def test_nothing_is_unpickled_by_torch() -> None:
    assert [name(f) for f in FILES if "torch.load(" in f.read_text() or "_object_list(" in f.read_text()] == []


def test_the_training_loop_can_be_read_aloud() -> None:
    text = (PACKAGE / "train.py").read_text()
    assert len(text.splitlines()) <= 180
    headers = [node.iter for node in ast.walk(ast.parse(text)) if isinstance(node, ast.For)]
    for header in headers:
        steps = [node for node in ast.walk(header) if isinstance(node, ast.Attribute) and node.attr == "steps"]
        assert len(steps) <= 1, "only one thing decides on the steps"


TOKENIZING = re.compile(
    r".*apply_chat_template|(.*\.)?tokenizer|.*\._tokenizer|.*tokenizer\.(encode|encode_plus|batch_encode_plus|tokenize)"
)


def tokenizing(path: Path) -> list[str]:
    """Return the calls of a file that give a tokenizer text."""
    calls = (ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return [call for call in calls if TOKENIZING.fullmatch(call)]


def test_no_sampled_text_becomes_tokens_again() -> None:
    """What a policy sampled stays as it is: few files turn text into tokens, and these are other people's words."""
    assert {name(f) for f in FILES if tokenizing(f)} == {"prompts/encoding.py"}
    importers = {name(f) for f in FILES if any(m.startswith("bapo_megatron.prompts.encoding.") for m in imported(f))}
    assert importers == {
        "engines/embedded/text.py",  # `bapo serve` and `bapo chat`
        "preflight/inputs.py",  # answers, to be measured
        "preflight/starter.py",  # prompts, to be measured
        "prompts/continuation.py",  # messages of environments
        "prompts/stop_tokens.py",  # names of stop tokens
        "prompts/stream.py",  # prompts
        "prompts/tools.py",  # whether the template shows tools: text only
        "rollout/teacher.py",  # a text of its own, to ask servers of a teacher
        "rollout/turn_tokens.py",  # texts of environments
    }
