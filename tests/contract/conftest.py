"""Engines for the contract suite: every kind in `LAUNCHERS` must pass the same tests."""

from collections.abc import Iterator

import pytest

from tests.rollout_servers import LAUNCHERS, Servers, started, tiny_model

# Enough to see a real SGLang server sample, take weights and return log-probs before the slow part of the suite.
QUICK = (
    "test_greedy_continuation_equals_transformers[sglang]",
    "test_logprobs_are_those_of_the_tempered_distribution[sglang-1.0]",
    "test_one_push_updates_both_servers[sglang]",
)

# What the ranks of one server do together. In the other tests they follow a scheduler that one rank has too.
OF_RANKS = (
    "test_logprobs_are_those_of_the_tempered_distribution",
    "test_behaviour_logprobs_are_those_of_the_cut_distribution",
    "test_greedy_continuation_equals_transformers",
    "test_one_push_updates_both_servers",
    "test_retracted_requests_go_on_with_the_new_weights",
    "test_abort_pause_returns_what_there_is",
    "test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_in_pieces",
    "test_weights_updated_in_place_take_over_at_the_next_token",
    "test_foreign_weights_are_refused_before_anything_is_sent",
    "test_weights_that_all_servers_refuse_end_a_push_at_once",
    "test_an_incomplete_push_is_noticed",
    "test_weights_from_disk_replace_those_of_all_servers",
    "test_a_trace_is_written",
    "test_scores_are_log_probs_of_a_prefill",
    "test_likeliest_tokens_of_the_sampler_come_with_each_token",
    "test_requests_outlive_a_push_as_the_channels_pause_mode_says",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if "[sglang-tp2" in item.name and not item.name.startswith(OF_RANKS)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        if item.name in QUICK:
            item.add_marker(pytest.mark.quick)


@pytest.fixture(
    scope="module",  # end it before other tests begin: an idle SGLang server spins on its cores
    params=[pytest.param(kind, marks=pytest.mark.slow if "sglang" in kind else ()) for kind in LAUNCHERS],
)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with started(
        request.param, LAUNCHERS[request.param], tiny_model, tmp_path_factory.mktemp(request.param)
    ) as servers:
        yield servers


@pytest.fixture
def servers(running: Servers) -> Iterator[Servers]:
    """Return idle servers with weights "a", not paused; a group that the last test broke is formed again."""
    if running.channel is None:
        running.connect()
    running.push("a")
    running.wait_until_idle()
    yield running
    for engine in running.engines:
        running.loop.run(engine.resume())
        running.loop.run(engine.abort())
