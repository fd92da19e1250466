"""Run a compiled function on the OpenMP threads that torch and vLLM already use.

vLLM pins one OpenMP thread to each core it was given, and those threads spin while they wait. Any
other pool fights them: its threads are born with the one-core mask of the main thread (Numba's
workqueue layer: both of two threads on core 0, half the speed), or sit where an OpenMP thread
spins. So none is made. `run_on_all_threads` asks the OpenMP runtime that is already loaded, through
GOMP_parallel, the function behind every `#pragma omp parallel` that GCC compiles; libgomp has it,
and so have libiomp5 and libomp, which vLLM may preload instead. The number of threads, their cores
and their spinning stay as vLLM set them up. Numba's own omp layer would do as well (measured: alike)
but needs a libgomp.so.1.0.0 on the system, and quietly becomes workqueue where there is none.
"""

import ctypes
import functools

import torch  # noqa: F401  loads the OpenMP runtime whose threads we borrow


@functools.cache
def _openmp():
    """(GOMP_parallel, omp_get_max_threads) of the runtime torch uses, or None where there is none (macOS)."""
    loaded = ctypes.CDLL(None)
    try:
        parallel, max_threads = loaded.GOMP_parallel, loaded.omp_get_max_threads
    except AttributeError:
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    max_threads.argtypes = []
    max_threads.restype = ctypes.c_int
    return parallel, max_threads


def num_threads() -> int:
    """How many threads `run_on_all_threads` uses at most; what torch's own operators use."""
    openmp = _openmp()
    return openmp[1]() if openmp else 1


def run_on_all_threads(function_address: int, argument_address: int, threads: int) -> None:
    """Call `void function(void *argument)` once on each thread, and wait, without the GIL."""
    openmp = _openmp()
    if openmp is None:
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function_address)(argument_address)
    else:
        openmp[0](function_address, argument_address, threads, 0)
