"""`vllm-evict bench quality`: its rows are what an eager forward under their evictions says, and all of it runs."""

import json
import struct
import zlib

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.text import tiny_tokenizer
from tests.models.tiny import MODELS
from tests.oracle.forward import load, masked_forward, masked_keys
from tests.oracle.keys import key_difference
from tests.oracle.mass import distant_mean, page_mass
from tests.oracle.visibility import Eviction, visibility_mask
from vllm_evict import cli
from vllm_evict.bench import stream_quality, text
from vllm_evict.bench.quality.cases import contexts
from vllm_evict.bench.quality.command import methods
from vllm_evict.bench.quality.replay import ATTENTION, Replay, Row
from vllm_evict.bench.quality.statistics import interval, paired

BUDGET, CHUNK = 128, 32
NUM_TOKENS = 330


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_tokenizer(folder)
    return MODELS["tiny"](folder)


@pytest.fixture(scope="module")
def read(folder):
    """Replay of a random text: (tokens, rows, their evictions, what they knew at the last one, their logits)."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION).eval()
    tokens = torch.randint(0, 500, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    replay = Replay(model, methods(BUDGET, seed=1), CHUNK)
    evictions = {id(row): [] for row in replay.rows}
    known = {}
    evict = Row.evict

    def watched(row, num_tokens, keys):
        scores = None if row.mass is None else row.mass.scores(row.pages, num_tokens)
        known[id(row)] = (num_tokens, row.pages, scores, keys)
        gone = evict(row, num_tokens, keys)
        evictions[id(row)].append(Eviction(num_tokens, tuple(gone.tolist())))
        return gone

    logits = []
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(Row, "evict", watched)
        for start, hidden in replay.read(tokens):
            assert start == CHUNK * len(logits)
            logits.append(model.lm_head(hidden).expand(len(replay.rows), -1, -1))
    return tokens.tolist(), replay.rows, evictions, known, torch.cat(logits, dim=1)


NUM_METHODS = len(methods(BUDGET, seed=1))


@pytest.mark.parametrize("index", range(NUM_METHODS))
def test_a_row_is_an_eager_forward_under_its_evictions(folder, read, index):
    tokens, rows, evictions, known, logits = read
    row, oracle = rows[index], load(folder)
    mine = evictions[id(row)]
    assert len(mine) > 3 and all(len(e.pages) == CHUNK // row.page_tokens for e in mine)
    mask = visibility_mask(NUM_TOKENS, row.page_tokens, mine)
    expected, attentions = masked_forward(oracle, tokens, mask)
    assert (logits[index] - expected).abs().max() < 1e-4

    num_tokens, pages, scores, keys = known[id(row)]
    if row.method.name in ("h2o distant-mean", "h2o-keydiff"):
        mass = page_mass(attentions, row.page_tokens)
        distant = distant_mean(mass, row.page_tokens, num_tokens, BUDGET // 4)[torch.from_numpy(pages).long()]
        torch.testing.assert_close(torch.from_numpy(scores), distant, atol=1e-5, rtol=0, equal_nan=True)
    if "keys" in row.policy.signals:
        # What was evicted at that moment was still held when its keys were looked at.
        difference = key_difference(
            masked_keys(oracle, tokens, mask), row.page_tokens, resident=pages.tolist(), num_tokens=num_tokens
        )
        np.testing.assert_allclose(keys, list(difference.values()), atol=1e-5)


def test_the_whole_of_it_runs_and_goes_on_where_it_stopped(folder, tmp_path, capsys):
    (tmp_path / "text").write_text("".join(np.random.default_rng(0).choice(list("abcdefghij "), 6000)))
    command = ["bench", "quality", "--model", str(folder), "--text", str(tmp_path / "text"), "--stretches", "5"]
    command += ["--context-tokens", "256", "--passage-tokens", "24", "--output", str(tmp_path / "out")]
    assert cli.main([*command, "--at-most", "1"]) == 0
    assert "1 of 5 stretches" in capsys.readouterr().err
    first = (tmp_path / "out" / "stretch-0.json").stat().st_mtime_ns
    assert cli.main(command) == 0
    assert (tmp_path / "out" / "stretch-0.json").stat().st_mtime_ns == first
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("ratios: recommended=")
    for name in ("plain window", "h2o ema", "h2o-keydiff", "tokens: h2o sum"):
        assert printed.count(f"| {name} ") == 4
    result = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert len(result["measured"]) == 5 * 4 * (1 + 2 * (NUM_METHODS + 2))
    for measured in result["measured"]:
        assert (abs(measured["kl"]) < 1e-6) == (measured["method"] == "full cache")
    with pytest.raises(SystemExit, match="other settings"):
        cli.main([*command, "--seed", "1"])


# ---- the parts ----


def test_places_and_what_a_window_has():
    made = contexts(range(4000), 4, context_tokens=400, passage_tokens=40, seed=0)
    assert [int(context.tokens[0]) // 500 for context in made] == [1, 3, 5, 7]  # second halves
    for context in made:
        assert context.tokens.tolist() == list(range(int(context.tokens[0]), int(context.tokens[0]) + 400))
        assert all(32 <= place <= 360 for place in context.places) and list(context.places) == sorted(context.places)
        assert context.passage(context.places[1]).tolist() == context.tokens[context.places[1] :][:40].tolist()
    # A window of 100 has tokens 300 to 399, and 340 to 399 when the passage has come again.
    assert [made[0].window_has(place, 100) for place in (260, 261, 339, 340)] == [False, None, None, True]
    with pytest.raises(ValueError, match="too short"):
        contexts(range(3000), 4, context_tokens=400, passage_tokens=40, seed=0)


def test_intervals_by_hand():
    assert interval({(0, 1): 2.0, (0, 2): 2.0, (1, 1): 2.0}) == (2.0, 2.0, 2.0)
    mean, low, high = interval({(stretch, 0): float(stretch % 2) for stretch in range(100)})
    assert mean == 0.5 and 0.38 < low < 0.42 and 0.58 < high < 0.62  # 1.96 * 0.5 / 10
    # Ten passages of one stretch are no ten stretches.
    mean, low, high = interval({(stretch, place): float(stretch % 2) for stretch in range(10) for place in range(10)})
    assert mean == 0.5 and low < 0.25 and high > 0.75
    assert paired({(0, 0): 1.0, (1, 0): 5.0}, {(0, 0): 2.0, (1, 0): 6.0}) == (-1.0, -1.0, -1.0)


def test_the_novels_are_read_from_r_s_own_format():
    def strings(*lines):
        of_lines = [struct.pack(">ii", 0x00040009, len(line)) + line for line in map(str.encode, lines)]
        return b"X\n\0\0\0\3" + struct.pack(">ii", 16, len(lines)) + b"".join(of_lines)

    objects = [strings("EMMA", "", "Chapter I: naïve"), strings("one line")]
    database = b"".join(struct.pack(">i", len(o)) + zlib.compress(o) for o in objects)
    assert text._books(database) == ["EMMA\n\nChapter I: naïve", "one line"]


# ---- which text it was ----

REFERENCE = "the Python language reference"


@pytest.fixture
def without_novels(monkeypatch, tmp_path):
    """No copy is kept, none is installed, and none can be downloaded."""
    monkeypatch.setattr(text, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(text, "_IN_PACKAGE", "no/such/file")
    monkeypatch.setattr(text, "_download", lambda: None)


def test_a_text_is_named_for_what_was_read(without_novels, monkeypatch, tmp_path):
    assert text.chosen_text(None) == (REFERENCE, text.real_text())
    mine = tmp_path / "mine.txt"
    mine.write_text("some words")
    assert text.chosen_text(str(mine)) == ("mine.txt", "some words")
    kept = tmp_path / "cache" / "novels.txt"
    kept.parent.mkdir()
    kept.write_text("of novels")
    assert text.chosen_text(None) == ("six novels by Jane Austen (Debian r-cran-janeaustenr)", "of novels")


def test_stream_quality_says_what_it_read(without_novels, folder, tmp_path, monkeypatch, capsys):
    """Printed and in every file: the text that the engine was given."""
    read = []

    def measured(model, text, name, eviction, settings):
        read.append(text)
        return [25.0, 26.0]

    monkeypatch.setattr(stream_quality, "_measured", measured)
    output = tmp_path / "out"
    assert cli.main(["bench", "stream-quality", "--model", str(folder), "--output", str(output)]) == 0
    files = list(output.glob("*.json"))
    assert len(files) == len(read) == len(stream_quality.methods(1024))
    assert set(read) == {text.real_text()}
    assert {json.loads(file.read_text())["settings"]["text"] for file in files} == {REFERENCE}
    printed = capsys.readouterr().out
    assert REFERENCE in printed and "novels" not in printed
