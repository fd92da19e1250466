"""`--attention-backend XFORMERS`: xFormers' kernel under Triton's interpreter, judged by a reference and the oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xformers", reason="no xFormers here")

from tests.engine import checks
from tests.engine.harness import Run, random_prompt
from tests.models.tiny import tiny_mqa, tiny_swa
from tests.triton import children
from tests.triton.child import RUNNERS, Scenario
from tests.triton.xformers_cases import CASES
from tests.triton.xformers_compile import compiled, launched_with

# ---- one layer, one step ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> dict[str, dict[str, float]]:
    path = tmp_path_factory.mktemp("xformers") / "errors"
    command = [sys.executable, "-m", "tests.triton.xformers_cases", str(path)]
    done = subprocess.run(command, cwd=children.ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", CASES)
def test_matches_reference(errors, case):
    """Where nobody has written, and on pages that a window has left, there is NaN."""
    error = errors[case]
    assert error["output"] <= max(2 * error["plain"], 1e-6)
    assert error["log_sum_exp"] <= 2e-6  # fp32, whatever the inputs: page mass is made of it


# ---- a GPU that is not there -----------------------------------------------------------------------


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(("queries_per_slice", "heads_per_kv_head"), [(1, 4), (16, 4)])
@pytest.mark.parametrize("head_size", [128, 512])
def test_compiles_without_spilling(monkeypatch, tmp_path, capability, queries_per_slice, heads_per_kv_head, head_size):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    arguments = launched_with(
        capability=capability,
        head_size=head_size,
        queries_per_slice=queries_per_slice,
        heads_per_kv_head=heads_per_kv_head,
    )
    shared_bytes, stack_bytes = compiled(arguments, capability)
    assert stack_bytes == 0 and shared_bytes <= 99 << 10  # of the smallest GPUs it runs on, sm_86 and sm_89


# ---- engines ---------------------------------------------------------------------------------------

P = 16
BUDGET = {"budget": 4 * P, "sink": P, "recent": P}
POLICIES = {name: {"policy": name} for name in ("streaming", "h2o", "h2o-keydiff")} | {"off": None}
PROMPTS = {"long": random_prompt(5 * P + 9, seed=1), "page": random_prompt(P, seed=2)}
ENGINES = [
    ("V1", "streaming"),
    ("V1", "h2o"),
    ("V2", "off"),
    ("V2", "streaming"),
    ("V2", "h2o"),
    ("V2", "h2o-keydiff"),
    ("V2", "windows"),
    ("V2-async", "h2o"),
]


def scenario(folder: Path, runner: str, case: str) -> Scenario:
    version, asynchronous, graphs = RUNNERS[runner]
    windows = case == "windows"
    eviction = POLICIES["streaming" if windows else case]
    engine = {
        "model": folder / ("swa" if windows else "mqa"),
        "eviction": eviction and BUDGET | eviction,
        "trace": folder / f"{runner}-{case}.jsonl" if eviction else None,
        "page_tokens": P,
        "chunk_tokens": 2 * P,
        "num_pages": 64,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "attention_backend": "XFORMERS",
    }
    prompts = {"long": PROMPTS["long"]} if windows else PROMPTS
    tokens = {"long": 20, "page": 3 * P + 9}
    run = {"prompts": prompts, "max_tokens": {name: tokens[name] for name in prompts}, "num_logits": -1}
    return Scenario(version, "XFORMERS", asynchronous, graphs, engine, run)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[tuple[str, str], Run]:
    folder = tmp_path_factory.mktemp("xformers")
    tiny_mqa(folder / "mqa")
    tiny_swa(folder / "swa", window_tokens=2 * P, num_layers=2)
    scenarios = [scenario(folder, *engine) for engine in ENGINES]
    return dict(zip(ENGINES, children.run("tests.triton.child", folder, scenarios), strict=True))


@pytest.mark.parametrize("engine", ENGINES, ids="-".join)
def test_engine(runs, engine):
    run = runs[engine]
    if run.eviction:
        assert all(run.trace[name] for name in run.answers)
    # `pool` knows of one group of layers, and without eviction there is no budget to judge by.
    all_apply = run.eviction and engine[1] != "windows"
    for check in checks.ALWAYS if all_apply else (checks.logits, checks.greedy_tokens, checks.attended):
        if engine[0] != "V2-async" or check not in checks.SYNCHRONOUS:
            check(run)


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine[1].startswith("h2o")], ids="-".join)
def test_masses(runs, engine):
    checks.masses(runs[engine])
    if engine[1] == "h2o-keydiff":
        checks.key_differences(runs[engine])


@pytest.mark.parametrize("policy", ["streaming", "h2o"])
def test_both_runners_say_the_same(runs, policy):
    checks.same_answers(runs["V1", policy], runs["V2", policy])


# ---- how it is chosen ------------------------------------------------------------------------------


def fresh(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=children.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


FLAG = """
import pickle, sys
from vllm.config import AttentionConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
engine_args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", ".", "--attention-backend", "XFORMERS"]))
config = AttentionConfig(backend=engine_args.attention_backend)
print("member:", config.backend.name, config.backend.get_path())
print("pickle:", pickle.dumps(config).hex())
"""

UNPICKLE = "import pickle; backend = pickle.loads(bytes.fromhex('"
SHOW = "')).backend; print('member:', backend.name, backend.get_path())"


def lines(out: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in out.splitlines() if line.startswith(("member: ", "pickle: ")))


def test_the_flag_survives_into_a_process_that_has_not_loaded_plugins():
    """vLLM unpickles a spawned process's config before it loads plugins there."""
    told = lines(fresh(FLAG))
    assert told["member"] == "XFORMERS vllm_evict.engine.attention.xformers.XFormersBackend"
    assert lines(fresh(UNPICKLE + told["pickle"] + SHOW))["member"] == told["member"]


def asked(**changed: object) -> list[str]:
    """Why vLLM would refuse the backend for a layer."""
    import torch
    from vllm.platforms.interface import DeviceCapability

    from vllm_evict.engine.attention.xformers import XFormersBackend

    layer = dict(
        head_size=128,
        dtype=torch.bfloat16,
        kv_cache_dtype="auto",
        block_size=16,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=DeviceCapability(8, 0),
        attn_type="decoder",
    )
    layer |= {name: getattr(torch, value) if name == "dtype" else value for name, value in changed.items()}
    return XFormersBackend.validate_configuration(**layer)


def test_what_it_takes():
    assert asked() == asked(has_sliding_window=True) == asked(dtype="float16", kv_cache_dtype="float16") == []


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        (dict(head_size=80), "head_size"),
        (dict(dtype="float32"), "dtype"),
        (dict(kv_cache_dtype="fp8"), "kv_cache_dtype"),
        (dict(block_size=8), "block_size"),
        (dict(use_mla=True), "MLA"),
        (dict(has_sink=True), "attention sinks"),
        (dict(use_mm_prefix=True), "multimodal"),
        (dict(attn_type="encoder_only"), "encoder_only"),
        (dict(device_capability=(7, 5)), "compute capability"),
        (dict(use_batch_invariant=True), "batch invariance"),
    ],
)
def test_what_it_refuses(changed, word):
    from vllm.platforms.interface import DeviceCapability

    if "device_capability" in changed:
        changed = {"device_capability": DeviceCapability(*changed["device_capability"])}
    (reason,) = asked(**changed)
    assert word in reason


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        (dict(alibi_slopes=[0.5]), "ALiBi"),
        (dict(logits_soft_cap=30.0), "soft cap"),
        (dict(attn_type="encoder"), "encoder attention"),
    ],
)
def test_what_a_layer_refuses(changed, word):
    """vLLM does not ask a backend about these."""
    from vllm_evict.engine.attention.xformers_impl import XFormersImpl

    layer = dict(num_heads=4, head_size=64, scale=1.0, num_kv_heads=2, alibi_slopes=None, sliding_window=None)
    with pytest.raises(NotImplementedError, match=f"XFORMERS does not work with .*{word}"):
        XFormersImpl(**layer | dict(kv_cache_dtype="auto") | changed)


def test_windows_in_a_group_with_full_layers_are_refused():
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_evict.engine.attention.xformers_impl import XFormersMetadataBuilder

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float16, sliding_window=64)
    with pytest.raises(ValueError, match="--disable-hybrid-kv-cache-manager"):
        XFormersMetadataBuilder(spec, ["layer"], None, torch.device("cpu"))


def test_pages_that_do_not_lie_evenly_are_refused():
    import torch

    from vllm_evict.engine.attention.xformers_impl import _one_row

    cache = torch.zeros(4, 32, 2, 64)
    assert _one_row(cache, 3).shape == (1, 128, 2, 3, 64)
    with pytest.raises(ValueError, match="equally far apart"):
        _one_row(cache[:, :16], 3)


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    from vllm_evict.engine.attention import xformers

    monkeypatch.setattr(xformers, "find_spec", lambda name: None)
    assert asked() == ["xformers is not installed: pip install 'vllm-evict[xformers]'"]


def test_choosing_the_backend_does_not_import_the_package():
    """The message above is seen only if the module that holds it can be imported."""
    fresh("import sys; sys.modules['xformers'] = None; import vllm_evict.engine.attention.xformers")
