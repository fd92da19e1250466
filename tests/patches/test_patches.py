"""The patches apply to vLLM as released, and with them nothing of vLLM is wrapped and everything is the same."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import vllm_evict.engine
from tests.patches.patched_vllm import PATCHES, copy_sources, git_apply, make_patched_vllm
from vllm_evict.engine.support import EVICTING_BACKENDS

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "patches" / "README.md"
HEADINGS = ("Why: ", "How: ", "Upstream: ", "Remove when: ", "Made for: ")


def ledger():
    """`{file name: (function in compat.py, added, removed)}`"""
    row = re.compile(r"^\| \[(\S+)\]\(\1\) \| `(\w+)` \| [^|]+ \| (\d+) / (\d+) \|$", re.MULTILINE)
    return {name: (function, int(more), int(less)) for name, function, more, less in row.findall(LEDGER.read_text())}


def counts(patch):
    """Added and removed lines of a patch."""
    body = patch.read_text().split("\n---\n", 1)[1]
    lines = [line for line in body.splitlines() if not line.startswith(("+++", "---"))]
    return sum(line.startswith("+") for line in lines), sum(line.startswith("-") for line in lines)


def test_ledger_folder_and_compat_agree():
    assert set(ledger()) == {path.name for path in PATCHES}
    compat = (Path(vllm_evict.engine.__file__).parent / "compat.py").read_text()
    functions = [f for f in ast.parse(compat).body if isinstance(f, ast.FunctionDef) and not f.name.startswith("_")]
    assert sorted(function for function, _, _ in ledger().values()) == sorted(f.name for f in functions)
    for function in functions:
        [patch] = [name for name, (replaced, _, _) in ledger().items() if replaced == function.name]
        assert f"patches/{patch}" in ast.get_docstring(function).replace("\n", "")


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.name)
def test_each_patch_says_what_it_is(patch):
    head, _ = patch.read_text().split("\n---\n", 1)
    title, *rest = head.splitlines()
    assert title and rest[0] == ""
    assert [line for line in rest if line.startswith(HEADINGS)] == [
        next(line for line in rest if line.startswith(heading)) for heading in HEADINGS
    ]
    assert ledger()[patch.name][1:] == counts(patch)
    released = re.sub(r"\+.*", "", version("vllm"))
    assert f"Made for: vllm {released}" in head.splitlines()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.name)
def test_each_patch_applies_to_vllm_as_released(patch, tmp_path):
    copy_sources(tmp_path, [patch])
    checked = git_apply(tmp_path, [patch], "--check")
    assert checked.returncode == 0, checked.stderr
    assert git_apply(tmp_path, [patch]).returncode == 0
    assert git_apply(tmp_path, [patch], "--check").returncode != 0  # the check can fail


def test_all_patches_apply_together(tmp_path):
    copy_sources(tmp_path, PATCHES)
    assert git_apply(tmp_path, PATCHES, "--check").returncode == 0


# ---- on a patched copy ----

WORDS = """
import json, sys
import vllm
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends import registry

def say(**what):
    wrapped = [m for m in ("add_cli_args", "from_cli_args", "create_engine_config")
               if hasattr(getattr(EngineArgs, m), "__wrapped__")]
    print("RESULT " + json.dumps(dict(vllm=vllm.__file__, wrapped=wrapped, **what)))
"""

FLAGS = (
    WORDS
    + """
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
flags = ["--kv-eviction", "streaming", "--kv-eviction-budget", "96", "--enforce-eager", "--max-model-len", "512"]
args = parser.parse_args(["--model", sys.argv[1], "--skip-tokenizer-init", *flags])
config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
say(
    settings=config.additional_config["kv_eviction"],
    block_size=config.cache_config.block_size,
    scheduler=config.scheduler_config.scheduler_cls,
    worker=config.parallel_config.worker_cls,
)
try:
    args = parser.parse_args(["--model", sys.argv[1], "--skip-tokenizer-init", *flags, "--kv-eviction-sink", "96"])
    AsyncEngineArgs.from_cli_args(args).create_engine_config()
except SystemExit as end:
    print(f"RESULT {json.dumps({'exit': end.code})}")
"""
)

TOKENS = (
    WORDS
    + """
import unittest.mock
import torch
torch.set_num_threads(1)
torch.compiler.set_stance("force_eager")
from vllm import LLM, SamplingParams

overridden = unittest.mock.Mock(wraps=registry.register_backend)
import vllm_evict.engine.compat as compat
compat.register_backend = overridden
llm = LLM(
    sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, distributed_executor_backend="uni",
    kv_cache_memory_bytes=16 << 20, max_model_len=1024, max_num_batched_tokens=64, seed=0,
    additional_config={"kv_eviction": {"policy": "streaming", "budget": 96}},
)
prompts = [[(7 * i + n) % 512 for i in range(n)] for n in (5, 130, 300)]
sampling = SamplingParams(temperature=0.0, max_tokens=100, detokenize=False, ignore_eos=True)
outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
say(
    tokens=[list(output.outputs[0].token_ids) for output in outputs],
    evicted=scheduler.page_evictor.stats.num_evicted_pages,
    registry_overrides=sorted(c.args[0].name for c in overridden.call_args_list if not isinstance(c.args[0], str)),
)
"""
)


def run(code, *args, vllm=None):
    """The RESULT lines of `code` in a fresh interpreter, on the vLLM in folder `vllm` (default: the installed one)."""
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    if vllm is not None:
        environment["PYTHONPATH"] = str(vllm)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line) for line in lines], done.stderr


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    return make_patched_vllm(tmp_path_factory.mktemp("patched"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from tests.models.tiny import tiny

    return tiny(tmp_path_factory.mktemp("tiny"))


def test_flags_reach_the_config_through_the_patched_hook(patched, tmp_path):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 4, "vocab_size": 512}))
    [result, refused], stderr = run(FLAGS, tmp_path, vllm=patched)
    assert result == {
        "vllm": str(patched / "vllm" / "__init__.py"),
        "wrapped": [],
        "settings": {"policy": "streaming", "budget": 96},
        "block_size": 32,
        "scheduler": "vllm_evict.engine.scheduler.EvictionScheduler",
        "worker": "vllm_evict.engine.worker.EvictionCPUWorker",
    }
    # A wrong setting is one line and exit code 2, as on released vLLM.
    assert refused == {"exit": 2}
    assert "vllm: error: --kv-eviction-budget 96 is too small" in stderr


@pytest.mark.slow
def test_same_tokens_with_patches_as_with_wrapping(patched, model):
    [with_patches], _ = run(TOKENS, model, vllm=patched)
    [with_wrapping], _ = run(TOKENS, model)
    assert with_patches.pop("wrapped") == []
    assert with_wrapping.pop("wrapped") == ["add_cli_args", "from_cli_args", "create_engine_config"]
    assert with_patches.pop("registry_overrides") == []
    assert with_wrapping.pop("registry_overrides") == sorted(EVICTING_BACKENDS)
    assert Path(with_patches.pop("vllm")).is_relative_to(patched)
    assert not Path(with_wrapping.pop("vllm")).is_relative_to(patched)
    assert with_patches["evicted"] > 10
    assert with_patches == with_wrapping


ENGINE_TESTS = """
import sys
import pytest
status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", "tests/engine"])
import vllm
assert vllm.__file__ == sys.argv[1], vllm.__file__
sys.exit(status)
"""


@pytest.mark.slow
def test_engine_tests_pass_on_the_patched_copy(patched):
    """All of tests/engine, with vLLM's hooks instead of our wrapping. Takes seven minutes and more."""
    done = subprocess.run(
        [sys.executable, "-c", ENGINE_TESTS, str(patched / "vllm" / "__init__.py")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(patched), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
