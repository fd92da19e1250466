import pytest

from tests.bookkeeping.harness import Bench
from tests.models.tiny import tiny


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return str(tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def stock_config(model_path):
    """A `VllmConfig` without eviction; tests copy it, see `harness.configured`."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=model_path,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=8,
    ).create_engine_config()


@pytest.fixture
def bench(stock_config):
    """`bench(policy=..., num_blocks=..., ...)`; budget 4 pages, 1 of them sink, 2 recent, unless `settings` says."""
    return lambda **options: Bench(stock_config, **options)
