"""What the images do when they are built and started, as plain processes: no Docker engine needed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import pytest
import yaml

import vllm_evict
from tests.deploy.dockerfile import Stage, stages
from vllm_evict.embedded_model import embedded_model_path

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UV = ROOT / ".bootstrap" / "bin" / "uv"
START_SECONDS = 300


def uv_environment() -> dict[str, str]:
    """uv does not read pip's settings (as in setup.sh)."""
    index = os.environ.get("PIP_INDEX_URL")
    return os.environ | ({"UV_DEFAULT_INDEX": index} if index and "UV_DEFAULT_INDEX" not in os.environ else {})


def uv(*arguments, **kwargs):
    assert UV.is_file(), "make setup brings uv"
    command = [str(UV), *map(str, arguments)]
    done = subprocess.run(command, env=uv_environment(), capture_output=True, text=True, timeout=600, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def copy_sources(folder: Path, names: list[str]) -> None:
    """As COPY does, leaving out what .dockerignore leaves out."""
    for name in names:
        source, target = ROOT / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
        else:
            shutil.copyfile(source, target)


# ---- the wheel ----


def pinned(*names):
    """Lines of the CPU lock."""
    lock = (DEPLOY / "setup" / "locks" / "cpu.txt").read_text().splitlines()
    return [line for line in lock if line.split("==")[0] in names]


def test_wheel_in_an_empty_environment(tmp_path):
    """It brings its version, licence, types and entry points, and the pure parts work without vLLM."""
    copy_sources(tmp_path / "src", ["pyproject.toml", "README.md", "LICENSE", "vllm_evict"])
    uv("build", "--wheel", "--quiet", "--no-build-isolation", "--python", sys.executable, cwd=tmp_path / "src")
    [wheel] = (tmp_path / "src" / "dist").glob("*.whl")
    assert wheel.name == f"vllm_evict-{vllm_evict.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert "vllm_evict/py.typed" in names and "vllm_evict/policies/h2o.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(("tests", "deploy", "docs")) for name in names)

    uv("venv", "--quiet", "--python", sys.executable, tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    needs = pinned("numpy", "pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection")
    uv("pip", "install", "--quiet", "--no-deps", "--python", python, wheel, *needs)

    def run(*command):
        bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        return subprocess.run([*map(str, command)], env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    program = python.with_name("vllm-evict")
    assert run(program, "--version").stdout == f"vllm-evict {vllm_evict.__version__}\n"
    listed = run(program, "policies")
    assert (listed.returncode, listed.stderr) == (0, "") and "streaming" in listed.stdout
    said = run(python, "-c", "import vllm_evict.config; print(vllm_evict.__file__)")
    assert Path(said.stdout.strip()).is_relative_to(tmp_path / "venv")
    code = "from importlib.metadata import entry_points as e; print([x.value for x in e(group='vllm.general_plugins')])"
    assert run(python, "-c", code).stdout == "['vllm_evict.engine.plugin:register']\n"
    # Without vLLM the doctor says so, with exit status 1.
    sick = run(program, "doctor")
    assert sick.returncode == 1 and re.search(r"^BAD  vllm +is not installed", sick.stdout, re.MULTILINE)


# ---- the image ----


@contextlib.contextmanager
def serving(command: list[str], port: int, environment: dict[str, str], log: Path):
    """`command` as a process that answers on /health; ends it as a container engine does, by SIGTERM."""
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            time.sleep(0.5)
        yield process
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def chat(port: int) -> str:
    body = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps({"model": "smollm2-135m-instruct", **body}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def image_environment(bin_folder: Path) -> dict[str, str]:
    """Variables of the final stage; the cache is this machine's own, which has the embedded model already."""
    _, final = stages(DEPLOY / "Dockerfile.cpu")
    [line] = final.values("ENV")
    assert "PATH=/opt/vllm-evict/bin:$PATH" in line and "VLLM_EVICT_CACHE=/var/cache/vllm-evict" in line
    return os.environ | {
        "PATH": f"{bin_folder}:/usr/local/bin:/usr/bin:/bin",
        "VLLM_EVICT_CACHE": str(embedded_model_path().parent),
    }


def build(stage: Stage, folder: Path) -> Path:
    """Run a stage's COPY and RUN in `folder` instead of an image; returns the environment it makes."""
    source, target = folder / "src", folder / "opt"
    arguments = {"PATH": f"{UV.parent}:{os.environ['PATH']}"}
    for instruction, value in stage.steps:
        if instruction == "ARG":
            name, default = value.split("=", 1)
            arguments[name] = default.strip('"').replace("/opt/vllm-evict", str(target)).replace(" --no-cache", "")
            if name == "TORCH_SOURCE" and os.environ.get("PIP_FIND_LINKS"):
                arguments[name] = f"--find-links {os.environ['PIP_FIND_LINKS']}"
        elif instruction == "COPY":
            *names, _ = value.split()
            copy_sources(source, names)
        elif instruction == "RUN" and not value.startswith("pip install"):  # uv is here already
            command = value.replace("/opt/vllm-evict", str(target)).replace("python3.11", sys._base_executable)
            done = subprocess.run(
                ["sh", "-ec", command],
                cwd=source,
                env=os.environ | arguments,
                capture_output=True,
                text=True,
                timeout=900,
            )
            assert done.returncode == 0, done.stderr[-3000:]
    return target


@pytest.mark.slow
@pytest.mark.serve
def test_build_commands_and_start_command_of_the_cpu_image(tmp_path):
    first, final = stages(DEPLOY / "Dockerfile.cpu")
    environment = build(first, tmp_path)
    shutil.rmtree(tmp_path / "src")  # the final stage does not have it
    [start], port = final.values("CMD"), free_port()
    program, *arguments = json.loads(start)
    command = [str(environment / "bin" / program), *arguments, "--port", str(port)]
    with serving(command, port, image_environment(environment / "bin"), tmp_path / "log"):
        assert chat(port)
    log = (tmp_path / "log").read_text()
    assert "KV eviction h2o: pages of 32 tokens" in log
    shutil.rmtree(environment)  # gigabytes


@pytest.mark.slow
@pytest.mark.serve
def test_flags_of_compose_kubernetes_and_systemd_start_a_server(tmp_path):
    """`vllm serve --config serve.yaml`, with this machine's cache, a free port and a smaller KV cache."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    model, server = compose["services"]["model"]["command"], compose["services"]["server"]["command"]
    bin_folder, port = Path(sys.executable).parent, free_port()
    environment = image_environment(bin_folder)
    made = subprocess.run([str(bin_folder / model[0]), *model[1:]], env=environment, capture_output=True, text=True)
    flags = (DEPLOY / "serve.yaml").read_text().replace("/var/cache/vllm-evict", environment["VLLM_EVICT_CACHE"])
    assert yaml.safe_load(flags)["model"] == made.stdout.strip()
    config = tmp_path / "serve.yaml"
    config.write_text(flags)
    assert server[:3] == ["vllm", "serve", "--config"]
    command = [str(bin_folder / "vllm"), "serve", "--config", str(config), "--port", str(port)]
    command += ["--kv-cache-memory-bytes", "256M"]
    with serving(command, port, environment, tmp_path / "log"):
        assert chat(port)
    assert "KV eviction h2o: pages of 32 tokens; budget 1,024 tokens = 32 pages" in (tmp_path / "log").read_text()
