"""Who may import whom, and what importing and registering change in vLLM. Each check runs in a fresh interpreter."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_evict

PACKAGE = Path(vllm_evict.__file__).parent
MODULES = {
    ".".join(("vllm_evict", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
PURE = ("config", "pages", "policies", "scores.aggregate", "engine", "engine.cli_flags", "engine.plugin")

# part of the package: the parts it may import, beside itself
# reference.perplexity is a program to run: it measures the embedded model.
MAY_IMPORT = {
    "pages": set(),
    "policies": {"pages"},
    "scores": {"pages"},
    "config": {"pages", "policies", "scores"},
    "requests": {"pages", "policies", "config"},
    "positions": {"scores"},
    "engine": {"pages", "policies", "scores", "config", "requests", "positions"},
    "reference": set(),
}


def imports(path, module):
    """Absolute names imported anywhere in a file, and whether at module level: `{(name, at module level)}`."""
    found = set()

    def visit(node, top):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update((alias.name, top) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
                    base = ".".join([*package[: len(package) - child.level + 1], *filter(None, [base])])
                found.add((base, top))
                found.update((f"{base}.{alias.name}", top) for alias in child.names)
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            visit(child, top and not deferred and not for_types)

    visit(ast.parse(path.read_text(encoding="utf-8")), True)
    return found


def part_of(module):
    """`policies` for `vllm_evict.policies.h2o`."""
    return module.split(".")[1] if "." in module else ""


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)


# ---- by reading ----


def test_the_scan_sees_what_it_should(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("import vllm.a as b\nfrom . import c\nfrom ..d import e\ndef f():\n    from vllm import g\n")
    assert imports(path, "vllm_evict.policies.module") == {
        ("vllm.a", True),
        ("vllm_evict.policies", True),
        ("vllm_evict.policies.c", True),
        ("vllm_evict.d", True),
        ("vllm_evict.d.e", True),
        ("vllm", False),
        ("vllm.g", False),
    }
    assert {"vllm_evict", "vllm_evict.config", "vllm_evict.policies", "vllm_evict.engine.scheduler"} <= set(MODULES)


@pytest.mark.parametrize("module", [m for m in MODULES if part_of(m) != "engine"])
def test_only_the_engine_imports_vllm(module):
    for name, at_module_level in imports(MODULES[module], module):
        if name.split(".")[0] == "vllm":
            assert part_of(module) in ("bench", "cli") and not at_module_level, f"{module} imports {name}"


@pytest.mark.parametrize("module", [m for m in MODULES if part_of(m) in MAY_IMPORT])
def test_imports_point_one_way(module):
    own = part_of(module)
    for name, _ in imports(MODULES[module], module):
        if name.startswith("vllm_evict.") and part_of(name) != own and module != "vllm_evict.reference.perplexity":
            assert part_of(name) in MAY_IMPORT[own], f"{module} imports {name}"


def test_the_package_itself_imports_nothing():
    assert imports(MODULES["vllm_evict"], "vllm_evict") == set()
    assert imports(MODULES["vllm_evict.engine"], "vllm_evict.engine") == set()


# ---- by running ----


@pytest.fixture(scope="module")
def started():
    """The process that imports vLLM, started first because it takes long: the other checks run meanwhile."""
    code = f"CODES = {(OURS_FIRST, VLLM_FIRST)!r}\n{BOTH_ORDERS}"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def results(started):
    """`{order: what it found}`"""
    out, err = started.communicate(timeout=300)
    assert started.returncode == 0, err[-3000:]
    return dict(json.loads(line) for line in out.split("\n") if line.startswith('["'))


# What vLLM imports of others is imported once, then the process forks into the two orders.
BOTH_ORDERS = """
import os, sys
import numba, pydantic, torch, transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
assert not any(m.split(".")[0] == "vllm" for m in sys.modules)
child = os.fork()
exec(CODES[0] if child == 0 else CODES[1])
sys.stdout.flush()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""

HOOKED = """
import io, json, os, sys
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1 import kv_cache_spec_registry
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

def num_wrappers(function):
    n = 0
    while hasattr(function, "__wrapped__"):
        function, n = function.__wrapped__, n + 1
    return n

def hooked():
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return {
        "flags": [o for a in parser._actions for o in a.option_strings if o == "--kv-eviction"],
        "wrappers": [num_wrappers(getattr(EngineArgs, m)) for m in
                     ("add_cli_args", "from_cli_args", "create_engine_config")],
    }
"""

SNAPSHOT = """
from vllm.v1.attention.backends import registry
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.worker.cpu_worker import CPUWorker

CLASSES = (AsyncEngineArgs, EngineArgs, Scheduler, FullAttentionManager, FullAttentionSpec, CPUWorker)

def snapshot():
    return {
        "classes": {c.__name__: {k: id(v) for k, v in vars(c).items()} for c in CLASSES},
        "specs": sorted(c.__name__ for c in kv_cache_spec_registry._REGISTRY_KVCACHESPEC_LIST),
        "backends": {b.name: b.get_path() for b in registry.AttentionBackendEnum if b.value},
        "environment": dict(os.environ),
        "hooks": [repr(h) for h in sys.meta_path],
    }
"""

VLLM_FIRST = (
    HOOKED
    + SNAPSHOT
    + """
from vllm.plugins import load_general_plugins

filtered = os.fork()  # a vLLM whose user has filtered the plugin out
if filtered == 0:
    os.environ["VLLM_PLUGINS"] = ""
    sys.stderr = io.StringIO()
    try:
        AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(["--kv-eviction", "h2o"])
        code = None
    except SystemExit as stop:
        code = stop.code
    print(json.dumps(["filtered", {"code": code, "error": sys.stderr.getvalue()}]), flush=True)
    os._exit(0)
os.waitpid(filtered, 0)

kv_cache_spec_registry.KVCacheSpecRegistry.get_manager_class(FullAttentionSpec)
before = snapshot()
import vllm_evict, vllm_evict.config, vllm_evict.engine, vllm_evict.engine.plugin, vllm_evict.engine.cli_flags
imported = snapshot()
import vllm_evict.engine.compat
compat = snapshot()
vllm_evict.engine.plugin.register()
registered = snapshot()
once = hooked()  # vLLM loads its plugins in here as well
load_general_plugins()
vllm_evict.engine.plugin.register()
vllm_evict.engine.plugin.register()
again = snapshot()
changed = {f"{c}.{k}" for c, members in registered["classes"].items() for k, v in members.items()
           if before["classes"][c].get(k) != v}
print(json.dumps(["vLLM first", {
    "unchanged": before == imported == compat,
    "changed": sorted(changed),
    "rest unchanged": {k: registered[k] == before[k] for k in before if k not in ("classes", "backends")},
    "backends": [b for b in registered["backends"] if b not in before["backends"]],
    "backends unchanged": all(registered["backends"][b] == path for b, path in before["backends"].items()),
    "once": once,
    "thrice": hooked(),
    "stable": again == registered,
}]))
"""
)

# Our modules before any of vLLM's; our spec before vLLM has filled its registry.
OURS_FIRST = (
    """
import vllm_evict.engine.plugin
vllm_evict.engine.plugin.register()
import vllm_evict.engine.spec
vllm_evict.engine.plugin.register()
"""
    + HOOKED
    + """
vllm_evict.engine.plugin.register()
get = kv_cache_spec_registry.KVCacheSpecRegistry.get_manager_class
layer = dict(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.float32)
specs = (
    vllm_evict.engine.spec.EvictingAttentionSpec(**layer),
    FullAttentionSpec(**layer),
    SlidingWindowSpec(**layer, sliding_window=64),
)
print(json.dumps(["ours first", hooked() | {"managers": [get(spec).__name__ for spec in specs]}]))
"""
)


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_without_vllm_and_torch(module, started):
    # `None` makes an import fail at once; `started` because the others may as well run meanwhile.
    done = run(f"import sys; sys.modules['vllm'] = sys.modules['torch'] = None; import vllm_evict.{module}")
    assert done.returncode == 0, done.stderr


def test_a_module_that_needs_vllm_fails_without_it(started):
    """The check above can fail."""
    done = run("import sys; sys.modules['vllm'] = None; import vllm_evict.engine.scheduler")
    assert done.returncode != 0 and "vllm" in done.stderr


def test_importing_changes_nothing_and_registering_three_times_is_registering_once(results):
    result = results["vLLM first"]
    assert result["unchanged"]
    assert result["changed"] == [
        "EngineArgs._vllm_evict_hooked",
        "EngineArgs.add_cli_args",
        "EngineArgs.create_engine_config",
        "EngineArgs.from_cli_args",
    ]
    assert all(result["rest unchanged"].values()), result["rest unchanged"]
    assert result["backends"] == ["XFORMERS"] and result["backends unchanged"]
    assert result["once"] == result["thrice"] == {"flags": ["--kv-eviction"], "wrappers": [1, 1, 1]}
    assert result["stable"]


def test_our_modules_first_is_the_same(results):
    result = results["ours first"]
    assert result["flags"] == ["--kv-eviction"]
    assert result["wrappers"] == [1, 1, 1]
    assert result["managers"] == ["EvictingBlockManager", "FullAttentionManager", "SlidingWindowManager"]


def test_filtered_out_by_vllm_plugins_the_flag_is_unknown(results):
    """C47: an error, not silently vanilla."""
    assert results["filtered"]["code"] == 2
    assert "unrecognized arguments: --kv-eviction" in results["filtered"]["error"]
