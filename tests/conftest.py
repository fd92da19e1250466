"""Settings for the whole test session, made before anything imports torch."""

import os

import pytest

# The models are tiny. More OpenMP threads than free cores spin against each other and
# slow everything down by an order of magnitude; one thread is fastest and deterministic.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests must not look for models on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """What one process of pytest-xdist runs in one piece: a file, or all of `tests/serve`, which shares two servers."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "tests/serve" if file.startswith("tests/serve/") else file

    return ByFile(config, log)
