"""Settings for the whole test session, made before anything imports torch."""

import os

import pytest

# The models are tiny. More OpenMP threads than free cores spin against each other and
# slow everything down by an order of magnitude; one thread is fastest and deterministic.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests must not look for models on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own reads the marks
def pytest_collection_modifyitems(items):
    """What one process of pytest-xdist runs in one piece: a file, or all that share the servers of `tests/serve`."""
    for item in items:
        shares = {"server", "plain", "starting"} & set(getattr(item, "fixturenames", ()))
        item.add_marker(pytest.mark.xdist_group("servers" if shares else item.nodeid.partition("::")[0]))
