"""What the stages of a pipeline have measured, on its way to the last one, whose rank alone replies to the scheduler.

Each stage sees its own layers only. It takes the sum of those before it, adds its own and hands on:

    stage 0            stage 1                  stage 2, the last
    own  ---send--->   received + own  --->     received + own = what one rank would have measured

All of it happens on the host, in one thread per worker, over a process group that nobody else uses: steps go on as if
there were no other stages, and vLLM's own messages between them cannot be mistaken for these.
"""

from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread

import numpy as np
import torch
import torch.distributed as dist

from vllm_evict.engine.host_copy import Arriving
from vllm_evict.engine.log import logger


class StageSum:
    """One array summed over the stages so far; ``array()`` waits for it."""

    def __init__(self) -> None:
        self.total: Future[np.ndarray] = Future()

    def array(self) -> np.ndarray:
        """The values, once they have arrived.

        Raises:
            RuntimeError: the stage before did not send them.

        """
        return self.total.result()


def group_for_relay(ranks: list[int], timeout_seconds: float) -> dist.ProcessGroup:
    """A group for ``StageRelay`` alone. These ranks call it together; others need not."""
    timeout = timedelta(seconds=timeout_seconds)
    return dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)


class StageRelay:
    """One per worker.

    Every stage adds arrays of the same shapes in the same order: they follow from the scheduler's output, which all of
    them get, so that nothing but values has to travel.

    Args:
        group: the ranks of the pipeline, first stage first, on the host; used by nobody else.
        timeout_seconds: how long a step may take. Half of it is granted to the stage before to send its sum after this
            one has measured: it is done with the step by then, and ours shall be the message that is read.

    """

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self._group = group
        self._stage = group.rank()
        self._is_last = self._stage == group.size() - 1
        self._patience = timedelta(seconds=timeout_seconds / 2)
        self._jobs: SimpleQueue[tuple[Arriving, StageSum]] = SimpleQueue()
        # A daemon: one that waits for a stage that is gone must not keep this process.
        Thread(target=self._run, name="kv-eviction-stages", daemon=True).start()

    def count(self, number: int) -> int:
        """The sum of every stage's ``number``. All call it, before anything is added."""
        total = torch.tensor([number])
        self._group.allreduce([total]).wait()
        return int(total)

    def add(self, own: Arriving) -> StageSum:
        """Pass on ``own`` and what the stages before have measured; on the last stage it adds up to everything."""
        stage_sum = StageSum()
        self._jobs.put((own, stage_sum))
        return stage_sum

    def _run(self) -> None:
        failure: Exception | None = None
        while True:
            own, stage_sum = self._jobs.get()
            # After a failure the next message might be of another step.
            if failure is None:
                try:
                    stage_sum.total.set_result(self._relay(own.array()))
                    continue
                except Exception as error:  # whoever reads the sum is told; on other stages nobody does
                    failure = error
                    if not self._is_last:
                        logger.error("%s", error)
            stage_sum.total.set_exception(failure)

    def _relay(self, own: np.ndarray) -> np.ndarray:
        total = own
        if self._stage > 0:
            received = torch.empty(own.shape, dtype=torch.float32)
            try:
                self._group.recv([received], self._stage - 1, 0).wait(self._patience)
            except RuntimeError as error:
                raise RuntimeError(
                    f"KV eviction: pipeline stage {self._stage} got no scores from stage {self._stage - 1} within "
                    f"{self._patience.total_seconds():g} s ({error}). Look for why that stage's worker stopped."
                ) from error
            total = received.numpy()
            total += own
        if not self._is_last:
            try:
                self._group.send([torch.from_numpy(total)], self._stage + 1, 0).wait()
            except RuntimeError as error:
                raise RuntimeError(
                    f"KV eviction: pipeline stage {self._stage} could not hand its scores on to stage "
                    f"{self._stage + 1} ({error}). Look for why that stage's worker stopped."
                ) from error
        return total
