"""Arithmetic and files of the throughput benchmark, without servers."""

import json

import pytest

from vllm_evict.bench.client import metric
from vllm_evict.bench.context import ContextResult
from vllm_evict.bench.load import (
    POLICIES,
    Measurement,
    Sample,
    Scenario,
    ScenarioResult,
    full_scenarios,
    paired_ratio,
    quick_scenarios,
    spread,
)
from vllm_evict.bench.report import markdown_table, read_json, throughput_report, write_json
from vllm_evict.bench.throughput import _chosen_parts, different_victims
from vllm_evict.pages import PageBudget

METRICS = """\
# HELP vllm:num_preemptions_total Cumulative number of preemptions.
vllm:num_preemptions_total{engine="0",model_name="bench"} 3.0
vllm:num_preemptions_total{engine="1",model_name="bench"} 4.0
vllm:num_preemptions_created{engine="0",model_name="bench"} 1.7e+09
plain 2.5
"""


def test_metric_sums_over_labels():
    assert metric(METRICS, "vllm:num_preemptions_total") == 7
    assert metric(METRICS, "plain") == 2.5


def test_a_metric_that_is_missing_is_an_error_and_not_zero():
    with pytest.raises(ValueError, match="vllm:num_preemptions"):
        metric(METRICS, "vllm:num_preemptions")


def test_ratio_compares_neighbours_in_time():
    """The machine was twice as fast in the second round: all rounds agree on 2, medians apart would say 1.5 or more."""
    assert paired_ratio([20, 40, 60], [10, 20, 20]) == 2
    assert spread([3.04, 1, 2], 1) == "2.0 [1.0, 3.0]"


def test_pools_of_the_paper():
    short, roomy, choosing = quick_scenarios(24, rounds=2)
    assert (short.usable_pages, roomy.usable_pages, choosing.usable_pages) == (80, 480, 128)
    assert [scenario.rounds for scenario in (short, roomy, choosing)] == [2, 2, 1]
    assert short.pool_share == pytest.approx(1 / 6) and roomy.pool_share == 1


def test_names_are_unique_and_every_pool_holds_one_request_without_eviction():
    scenarios = full_scenarios(24, rounds=3)
    assert len({scenario.name for scenario in scenarios}) == len(scenarios)
    assert all(scenario.full_requests >= 1 for scenario in scenarios)
    assert min(scenario.pool_share for scenario in scenarios) == 0.15


def test_parts_by_name():
    assert _chosen_parts(["a", "b"], None) == ["a", "b"]
    assert _chosen_parts(["a", "b"], ["b"]) == ["b"]
    assert _chosen_parts(["a", "b"], []) == []
    with pytest.raises(SystemExit, match="got c; the parts are a, b"):
        _chosen_parts(["a", "b"], ["c"])


# ---- what h2o chooses --------------------------------------------------------------

BUDGET = PageBudget(page_tokens=4, budget_pages=4, sink_pages=1, recent_pages=1)


def decision(pages, resident=(0, 1, 2, 3, 4), num_tokens=18):
    return json.dumps({"num_computed_tokens": num_tokens, "resident": list(resident), "pages": list(pages)})


@pytest.mark.parametrize(
    ("pages", "share"),
    [
        ([[1]], 0),  # the oldest page outside the sinks is what streaming takes
        ([[2]], 1),
        ([[1], [2], [3], [1]], 0.5),
        ([], None),
    ],
)
def test_different_victims(pages, share):
    assert different_victims([decision(p) for p in pages], BUDGET) == share


def test_different_victims_looks_at_the_pages_held_then():
    assert different_victims([decision([3], resident=(0, 3, 5, 6, 7), num_tokens=30)], BUDGET) == 0


# ---- files ---------------------------------------------------------------------------


def scenario_result(name, full_requests, tokens_per_second):
    """`tokens_per_second`: `{policy: one number per round}`."""
    samples = (Sample(0.0, 0, 0, 0, 0.0), Sample(2.0, 4, 1, 3, 0.5))
    measurements = [
        Measurement(policy, number, speed, 10.0, 20.0, 3, samples)
        for policy in POLICIES
        for number, speed in enumerate(tokens_per_second[policy], 1)
    ]
    scenario = Scenario(name, 128, 512, 128, full_requests, 24, 24, 3)
    # Not in order of rounds, as after a repeated piece.
    return ScenarioResult({"commit": "abc"}, scenario, tuple(reversed(measurements)), 0.25)


SHORT = scenario_result("short_pool", 4, {"off": [100, 50, 80], "streaming": [200, 110, 160], "h2o": [150, 100, 120]})
ROOMY = scenario_result("roomy", 24, {"off": [300, 200, 100], "streaming": [300, 210, 99], "h2o": [290, 190, 95]})
CONTEXT = ContextResult({"commit": "abc"}, 4, 512, (256, 1024), {p: [[5.0, 6.0], [7.0, 8.0]] for p in POLICIES})


def test_what_was_written_is_read(tmp_path):
    for name, result in (("scenario", SHORT), ("context", CONTEXT)):
        write_json(tmp_path / f"{name}.json", result)
    assert read_json(tmp_path / "scenario.json") == SHORT
    read = read_json(tmp_path / "context.json")
    assert list(read.contexts) == [256, 1024] and read.ms_per_token == CONTEXT.ms_per_token


def test_report_ends_with_the_ratios(tmp_path):
    for name, result in (("short_pool", SHORT), ("roomy", ROOMY), ("context", CONTEXT)):
        write_json(tmp_path / f"{name}.json", result)
    text = throughput_report(tmp_path)
    assert text.splitlines()[-1] == (
        "ratios: short_pool streaming/off=2.000 h2o/off=1.500 roomy streaming/off=1.000 h2o/off=0.950"
    )
    written = (tmp_path / "throughput.md").read_text()
    assert "commit abc" in written
    row = next(line for line in written.splitlines() if "80 (17%)" in line and " h2o " in line)
    assert "120 [100, 150]" in row and " 1.50 " in row


def test_report_of_one_piece_has_no_ratios(tmp_path):
    write_json(tmp_path / "short_pool.json", SHORT)
    assert "ratios:" not in throughput_report(tmp_path)


def test_one_picture_per_question(tmp_path):
    pytest.importorskip("matplotlib")
    from vllm_evict.bench.plots import plot_all

    paths = plot_all([SHORT, ROOMY], [CONTEXT], tmp_path)
    assert [path.name for path in paths] == ["tokens-per-second.png", "running-requests.png", "time-per-token.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    assert plot_all([ROOMY], [], tmp_path) == []


def test_columns_line_up():
    lines = markdown_table(["a", "long header"], [["value", "1"]]).splitlines()
    assert lines == ["| a     | long header |", "|-------|-------------|", "| value | 1           |"]
