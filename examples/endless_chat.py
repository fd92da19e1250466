"""A chat that outlasts the model: 50 turns over the API, past the length the model was made for, each answered.

The model knows the beginning (sinks) and the last turns; what lay between is forgotten.

    python examples/endless_chat.py                       # starts a server of its own, about ten minutes on two cores
    python examples/endless_chat.py --turns 14 --answer-tokens 80 --model-tokens 1024
    python examples/endless_chat.py --url http://127.0.0.1:8000/v1 --model NAME

Every turn sends the whole conversation, as a chat client does. A server without `--kv-eviction-positions rebase`
answers HTTP 400 as soon as that is longer than the model.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import openai

sys.path.insert(0, str(Path(__file__).parent))
from demo import free_port, stop_server, wait_until_ready

from vllm_evict.embedded_model import MODEL_NAME
from vllm_evict.launch import serve_command, serve_environment

BUDGET_TOKENS = 512
TOPICS = ("a lighthouse", "bread", "the moon", "a long journey by train", "rain", "chess", "a garden in winter")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--answer-tokens", type=int, default=200, help="tokens of each answer")
    parser.add_argument("--model-tokens", type=int, help="pretend that the model is this short (own server only)")
    parser.add_argument("--url", help="a server that runs already (default: start one)")
    parser.add_argument("--model", default=MODEL_NAME, help="its model")
    args = parser.parse_args()
    if args.url and args.model_tokens:
        parser.error("--model-tokens is for the server that this script starts; leave it out beside --url")
    if args.url:
        chat(args.url, args.model, args.turns, args.answer_tokens)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the `finally` below
    with tempfile.TemporaryDirectory(prefix="vllm-evict-endless-") as folder:
        log, port = Path(folder) / "server.log", free_port()
        server = start_server(port, args.model_tokens, log)
        try:
            wait_until_ready(server, port)
            chat(f"http://127.0.0.1:{port}/v1", args.model, args.turns, args.answer_tokens)
        except Exception:
            print(log.read_text(errors="replace"), file=sys.stderr)
            raise
        finally:
            stop_server(server)
    return 0


def start_server(port: int, model_tokens: int | None, log: Path) -> subprocess.Popen:
    options = ["--kv-eviction-positions", "rebase", "--max-model-len", "1000000", "--max-num-seqs", "2"]
    options += ["--max-num-batched-tokens", "256"]
    if model_tokens:
        options += ["--hf-overrides", json.dumps({"max_position_embeddings": model_tokens})]
    command = serve_command(policy="streaming", budget_tokens=BUDGET_TOKENS, port=port, extra=options)
    environment = os.environ | serve_environment(extra=options)
    with log.open("w") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def chat(url: str, model: str, num_turns: int, answer_tokens: int) -> None:
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    messages: list[dict[str, str]] = []
    for turn in range(1, num_turns + 1):
        topic = TOPICS[turn % len(TOPICS)]
        messages.append({"role": "user", "content": f"Turn {turn}. Tell me something about {topic}."})
        answer = client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=answer_tokens,
            temperature=0.7,
            extra_body={"min_tokens": answer_tokens // 2},
        )
        said = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        kept = (answer.model_extra.get("kv_transfer_params") or {}).get("kv_eviction", {})
        print(
            f"turn {turn:>2}: {answer.usage.total_tokens:>6} tokens, {kept.get('resident_tokens', '?')} held: "
            f"{said[:70]!r}",
            flush=True,
        )
        if not said.strip():
            raise RuntimeError(f"turn {turn} was not answered")
    print(f"{num_turns} turns answered, positions moved {num_rebases(url)} times")


def num_rebases(url: str) -> int:
    """How often the server has moved a request's positions down, by its own count."""
    with urllib.request.urlopen(url.rstrip("/").removesuffix("/v1") + "/metrics", timeout=30) as answer:
        metrics = answer.read().decode()
    return sum(
        int(float(n)) for n in re.findall(r"^vllm:kv_eviction_rebases_total\{.*\} (\S+)$", metrics, re.MULTILINE)
    )


if __name__ == "__main__":
    sys.exit(main())
