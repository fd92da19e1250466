"""What a start says and does: the start-up line, good command lines, and nothing at all without the flag."""

from __future__ import annotations

import re

import pytest

from tests.models.tiny import tiny
from tests.serve.conftest import BUDGET_TOKENS, CHUNK_TOKENS, EVICTION_PAGES, MAX_TOKENS, PAGE_BYTES, PLAIN_PAGES
from vllm_evict.config import EvictionConfig, flag_name
from vllm_evict.embedded_model import embedded_model_path

pytestmark = [pytest.mark.serve, pytest.mark.usefixtures("starting")]

P = 32  # tokens in a page


def test_startup_line(server):
    """One line: policy, lengths in tokens and pages, bounds, concurrency without and with eviction."""
    (line,) = [line for line in server.log.splitlines() if "KV eviction h2o" in line]
    usable, steady, peak = EVICTION_PAGES - 1, BUDGET_TOKENS // P + 1, BUDGET_TOKENS // P + CHUNK_TOKENS // P + 1
    for words in (
        "INFO",
        f"pages of {P} tokens",
        "budget 1,024 tokens = 32 pages",
        "sink 4 tokens = 1 pages",
        "recent 512 tokens = 16 pages",
        f"at most {steady} pages decoding, {peak} in prefill",
        f"{usable} usable pages",
        f"without eviction {usable / (MAX_TOKENS // P):.2f}x requests of {MAX_TOKENS:,} tokens",
        f"with eviction {usable / steady:.2f}x decoding ({usable / peak:.2f}x in prefill)",
    ):
        assert words in line


def test_sizing_uses_the_same_bound(server):
    """vLLM's own figure of how many requests fit comes from the same 49 pages."""
    assert server.cache_config["num_gpu_blocks"] == str(EVICTION_PAGES)
    assert server.cache_config["block_size"] == str(P)
    peak = BUDGET_TOKENS // P + CHUNK_TOKENS // P + 1
    concurrency = float(re.search(r"Maximum concurrency for 6,144 tokens per request: (\S+)x", server.log)[1])
    assert EVICTION_PAGES - 1 <= concurrency * peak <= EVICTION_PAGES + 0.5


def test_plain_server_says_nothing(plain):
    assert "eviction" not in plain.log
    assert plain.cache_config["num_gpu_blocks"] == str(PLAIN_PAGES)


# ---- good command lines ----


def test_help_lists_the_flags(command_lines):
    outcome = command_lines.serve("--help=KV eviction")
    assert outcome.status == 0
    for field in EvictionConfig.model_fields:
        assert f"  {flag_name(field)} " in outcome.output
    assert "  --kv-eviction-config JSON" in outcome.output


def test_flag_gives_pages_of_32_tokens_unless_asked_otherwise(command_lines):
    model = str(embedded_model_path())
    outcome = command_lines.serve(model, "--kv-eviction", "h2o")
    assert outcome.status == 0
    assert outcome.facts["block_size"] == 32
    assert outcome.facts["scheduler_cls"].startswith("vllm_evict.")
    assert outcome.facts["worker_cls"].startswith("vllm_evict.")
    outcome = command_lines.serve(model, "--kv-eviction", "h2o", "--block-size", "64")
    assert outcome.facts["block_size"] == 64


def test_json_and_flags_together(command_lines):
    """Single flags win over the JSON; both lie where the engine's processes find them."""
    outcome = command_lines.serve(
        str(embedded_model_path()),
        *("--kv-eviction-config", '{"policy": "streaming", "budget": 512, "sink": 32}', "--kv-eviction-budget", "256"),
    )
    assert outcome.status == 0
    assert outcome.facts["additional_config"] == {"kv_eviction": {"policy": "streaming", "budget": 256, "sink": 32}}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-eviction-budget", "64"],  # the minimum: a page of sinks and the page being written
        ["--kv-eviction-budget", "1000", "--kv-eviction-sink", "33"],  # no whole pages
        ["--kv-eviction-budget", str(2**31 - 1)],
        ["--kv-eviction-recent", "6143", "--kv-eviction-budget", "6176"],  # around the longest request
    ],
)
def test_extremes_that_are_allowed(command_lines, arguments):
    outcome = command_lines.serve(str(embedded_model_path()), "--kv-eviction", "h2o", *arguments)
    assert outcome.status == 0 and outcome.facts is not None
    assert "--kv-eviction-sink 0" not in outcome.output


def test_no_sinks_is_allowed_with_a_warning(command_lines):
    outcome = command_lines.serve(str(embedded_model_path()), "--kv-eviction", "h2o", "--kv-eviction-sink", "0")
    assert outcome.status == 0 and outcome.facts is not None
    (line,) = [line for line in outcome.output.splitlines() if "--kv-eviction-sink 0" in line]
    assert "WARNING" in line


# ---- off is off ----

NO_PLUGIN = {"VLLM_PLUGINS": ""}


@pytest.mark.parametrize("off", [(), ("--kv-eviction", "none")], ids=["absent", "none"])
def test_config_without_the_flag_is_vllms(command_lines, off):
    """Every setting that reaches the engine is the one of vLLM without any plugin."""
    model = str(embedded_model_path())
    ours = command_lines.serve(model, *off)
    plain = command_lines.serve(model, environment=NO_PLUGIN)
    assert ours.status == plain.status == 0
    assert ours.facts["block_size"] == plain.facts["block_size"] == 128
    assert ours.facts["worker_cls"] == plain.facts["worker_cls"]
    assert ours.facts["scheduler_cls"] is plain.facts["scheduler_cls"] is None
    if not off:
        assert ours.facts == plain.facts
    assert "KV eviction" not in ours.output


def test_engine_without_the_flag_is_vllms(command_lines, tmp_path):
    """Same tokens, pages and page size as without the plugin, and none of our engine's modules are loaded."""
    arguments = dict(
        model=str(tiny(tmp_path / "tiny")),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=512,
        distributed_executor_backend="uni",
        kv_cache_memory_bytes=16 << 20,
    )
    one_process = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    ours = command_lines.engine(one_process, **arguments)
    plain = command_lines.engine(one_process | NO_PLUGIN, **arguments)
    assert ours.status == plain.status == 0, ours.output + plain.output
    modules = ours.facts.pop("plugin_modules")
    assert "vllm_evict.engine.plugin" in modules and plain.facts.pop("plugin_modules") == []
    for name in ("scheduler", "worker", "spec", "block_manager", "runtime", "attention"):
        assert f"vllm_evict.engine.{name}" not in modules
    assert ours.facts == plain.facts
    assert len(ours.facts["tokens"]) == 32 and ours.facts["block_size"] == 128


def test_page_bytes():
    """The arithmetic by which this package sizes its pools is that of the model."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(embedded_model_path())
    heads, head_size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    assert config.num_hidden_layers * 2 * P * heads * head_size * 2 == PAGE_BYTES
