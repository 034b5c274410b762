"""The facts of a run: who derives them, and who gets which GPU."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bapo_megatron
from bapo_megatron.assets import demo_model_path
from bapo_megatron.config.load import load_config, shipped_configs
from bapo_megatron.config.schema import Config
from bapo_megatron.errors import CheckpointError, UserError
from bapo_megatron.preflight.checks.slurm import check_placement
from bapo_megatron.resolved import resolve
from bapo_megatron.resolved.placement import Device, Placement

PACKAGE = Path(bapo_megatron.__file__).parent

# Files that may derive a fact themselves, and how often. All others take it from `resolve` or `ModelFacts`.
DERIVES = {
    "own_family": {
        "resolved/__init__.py": 1,
        "preflight/checks/functions.py": 1,  # names the setting that cannot be loaded
        "verbs.py": 2,  # bapo convert, serve and chat: folders that belong to no run
        "engines/embedded/server.py": 1,  # another process
    },
    "engine_kind": {"resolved/__init__.py": 1, "config/engines.py": 1},
    "model_shape": {
        "hf/facts.py": 1,
        "hf/tokenizer.py": 1,
        "preflight/starter.py": 1,  # bapo init: there is no run yet
    },
}


def callers(name: str) -> Iterator[str]:
    """Yield the file of each call of a function, as a path below the package."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and name in (getattr(node.func, key, None) for key in ("id", "attr")):
                yield file.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("name", DERIVES)
def test_a_fact_is_derived_in_one_place(name: str) -> None:
    assert Counter(callers(name)) == DERIVES[name]


def test_a_run_is_resolved_with_or_without_its_model() -> None:
    config = load_config(["demo"], [])
    assert resolve(config).model is None
    run = resolve(config, demo_model_path())
    assert (run.folder, run.shape.family, run.streams) == (demo_model_path(), "qwen3", ())
    changed = run.changed(config.model_copy(update={"parallel": config.parallel.model_copy(update={"data": 3})}))
    assert (changed.model, changed.engine) == (run.model, run.engine)
    assert changed.placement.num_ranks == 3 * run.placement.num_ranks
    assert resolve(config, run.model.hf_config if run.model else {}).shape == run.shape


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    for setting in ("rollout.engine", "model.family"):
        with pytest.raises(UserError, match=f"{setting}=.nothing_here:X"):
            resolve(load_config(["demo"], [f"{setting}=nothing_here:X"]))
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        resolve(load_config(["demo"], []), tmp_path)


def dealt(placed: Placement, gpus_per_node: int | None) -> None:
    """Check a placement that is possible, device by device."""
    nodes = range(placed.num_nodes)
    ranks = [placed.rank(number) for number in range(placed.num_ranks)]
    servers = [placed.server(number) for number in range(placed.num_servers)]
    assert [device.node for device in ranks] == sorted(device.node for device in ranks), "in order"
    assert len({device.node for device in ranks}) == placed.trainer_nodes
    for devices in servers:
        assert len({device.node for device in devices}) == 1, "a server is on one machine"
        assert [device.gpu for device in devices] == list(range(devices[0].gpu, devices[0].gpu + len(devices)))
    if placed.servers_use_gpus:
        sides = Counter(ranks), Counter(device for devices in servers for device in devices)
        assert {1}.issuperset(count for side in sides for count in side.values())
        taken = sides[0] + sides[1]
        if placed.shares_gpus:
            assert min(sides, key=len).keys() <= max(sides, key=len).keys()
        else:
            assert set(taken.values()) == {1}, "nobody shares a GPU"
        assert len(taken) == placed.num_gpus
        assert max(Counter(device.node for device in taken).values()) == placed.gpus_per_node
        if gpus_per_node is not None:
            assert {device.gpu for device in taken} <= {*range(gpus_per_node)}
    shares = [placed.on(node) for node in nodes]
    assert sum(share.num_ranks for share in shares) == placed.num_ranks
    assert [number for share in shares for number in share.servers] == list(range(placed.num_servers))
    for node, share in enumerate(shares):
        for number, gpus in zip(share.servers, share.gpus, strict=True):
            assert servers[number] == tuple(Device(node, gpu) for gpu in gpus)


@pytest.mark.parametrize("name", shipped_configs())
def test_placements_of_shipped_configurations(name: str) -> None:
    """On its own, and on every cluster that is shipped too."""
    for cluster in (None, *(each for each in shipped_configs() if each.startswith("clusters/"))):
        files = [name, *([cluster] if cluster else [])]
        try:
            config = load_config(files, [])
        except UserError:
            continue  # a part that needs others
        run = resolve(config)
        old = sums(config, run.engine.specs is not None, run.engine.on_gpus)
        placed = run.placement
        if not placed.is_even:
            continue  # the checks refuse it
        assert (placed.num_gpus, placed.trainer_nodes, placed.server_nodes) == old[:3]
        share = placed.on(placed.first_server_node)
        assert (share.servers, share.gpus[0][0] if share.gpus else old[4]) == (range(old[3]), old[4])
        if not any(violation.severity == "error" for violation in check_placement(run)):
            dealt(placed, None if config.cluster.gpu is None else config.cluster.gpus_per_node)


def sums(config: Config, starts: bool, on_gpus: bool) -> tuple[int, int, int, int, int]:
    """Return GPUs, nodes that train, nodes that serve, servers on each of these and the first GPU of the first server:
    the sums that launcher, job, checks and plan once made, each for itself."""
    ranks, nodes, r = config.parallel.size, config.cluster.nodes, config.rollout
    servers = r.num_servers if starts else 0
    on_servers = servers * r.server_tensor_parallel if on_gpus else 0
    alone = 0
    if config.shares_gpus:
        return max(ranks, on_servers), nodes, nodes if servers else 0, servers // nodes, 0
    if nodes > 1 and config.slurm.rollout_nodes is not None:
        alone = config.slurm.rollout_nodes
    elif nodes > 1 and config.cluster.gpu is not None and on_servers % config.cluster.gpus_per_node == 0:
        alone = on_servers // config.cluster.gpus_per_node
        alone = alone if alone < nodes else 0
    serving = (alone or nodes) if servers else 0
    first_gpu = 0 if alone else ranks // (nodes - alone)
    return ranks + on_servers, nodes - alone, serving, servers // serving if serving else 0, first_gpu


@given(
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(1, 6),
    st.integers(0, 6),
    st.sampled_from((1, 2, 3)),
    st.booleans(),
    st.booleans(),
)
def test_every_even_placement_deals_each_device_once(
    nodes: int, alone: int, ranks: int, servers: int, width: int, on_gpus: bool, shared: bool
) -> None:
    alone = min(alone, nodes - 1) if servers and not shared else 0
    placed = Placement(
        num_nodes=nodes,
        engine_nodes=alone,
        num_ranks=ranks * (nodes - alone),
        num_servers=servers * (alone or nodes),
        gpus_per_server=width,
        servers_use_gpus=on_gpus,
        shares_gpus=shared,
    )
    assert placed.is_even
    dealt(placed, None)
    assert placed.without_trainer().on().servers == range(placed.num_servers)
