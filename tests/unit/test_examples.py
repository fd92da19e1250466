"""What the examples make of their command lines, before anything is started."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def endless_chat(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location("endless_chat", EXAMPLES / "endless_chat.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("start_server", "chat"):
        monkeypatch.setattr(module, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
    return module


def test_a_running_server_cannot_be_told_another_length(endless_chat, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["endless_chat.py", "--url", "http://localhost:1/v1", "--model-tokens", "1024"])
    with pytest.raises(SystemExit) as ended:
        endless_chat.main()
    assert ended.value.code == 2
    assert "--model-tokens is for the server that this script starts" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://localhost:1/v1", "http://localhost:1/v1/", "http://localhost:1"])
@pytest.mark.parametrize(
    ("metrics", "num_rebases"),
    [
        ('vllm:kv_eviction_rebases_total{engine="0"} 3.0\nvllm:kv_eviction_rebases_total{engine="1"} 4.0\n', 7),
        ("# HELP vllm:kv_eviction_rebases_total 9\nvllm:other_total 5.0\n", 0),
    ],
)
def test_rebases_are_read_off_the_server(endless_chat, monkeypatch, url, metrics, num_rebases):
    class Answer:
        def __init__(self, address, timeout):
            assert address == "http://localhost:1/metrics"

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self):
            return metrics.encode()

    monkeypatch.setattr(endless_chat.urllib.request, "urlopen", Answer)
    assert endless_chat.num_rebases(url) == num_rebases
