"""A real `vllm serve` in a process of its own, on a free loopback port, that can be paused.

A benchmark keeps all its servers up and runs them in turn. An idle vLLM still polls, which on a small machine
disturbs whoever is measured, so all but one are paused (SIGSTOP).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_evict.launch import serve_environment

START_TIMEOUT_SECONDS = 600


class ServerProcess:
    """Starts at once; `wait_ready` waits for it.

    Args:
        model: folder of the model.
        options: options of `vllm serve`.
        log: file that gets its output.
        environment: variables to set for it.

    """

    def __init__(
        self, model: str, options: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = _free_port()
        self.log = log
        command = [str(Path(sys.executable).with_name("vllm")), "serve", model, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), *options]
        with log.open("w") as output:
            # A session of its own: signals reach the engine's processes, too.
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | serve_environment(extra=options) | dict(environment or {}),
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        """Return when it answers.

        Raises:
            RuntimeError: it ended or did not answer in time; the end of its log is in the message.

        """
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"the server did not come up:\n{self.log.read_text()[-2000:]}")

    def pause(self) -> None:
        """Stop all its processes where they are."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End it, whatever its state."""
        for ending in (signal.SIGCONT, signal.SIGTERM):
            self._signal(ending)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
