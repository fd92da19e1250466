"""Settings for the whole test session, made before anything imports torch."""

import os

# The models are tiny. More OpenMP threads than free cores spin against each other and
# slow everything down by an order of magnitude; one thread is fastest and deterministic.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Tests must not look for models on a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
