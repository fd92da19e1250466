"""Triton kernels on the CPU, without setting TRITON_INTERPRET for the process.

`triton.jit` decides when it decorates whether a kernel is compiled or interpreted. The process of `make test` imports
vLLM, which must go on believing that there is no Triton here, and it compiles kernels for GPUs it does not have. So: a
copy of our modules of their own, decorated under TRITON_INTERPRET, beside those that anybody else imports; and while
the kernels run, interpreted versions of what `triton.language` itself writes in Triton (`tl.sum`, `tl.cdiv`, ...).

Of Triton 3.7's interpreter two things are mended: it multiplies the bits of bfloat16 matrices as integers, and a
function called by a kernel leaves the language changed behind it.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

import pytest
import triton.experimental.gluon  # noqa: F401  a first launch imports it, and it wants the library as it was
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, interpreter_builder
from triton.runtime.jit import JITFunction

import vllm_evict.scores

MODULES = ("triton_kernels", "triton", "triton_decode_kernels", "triton_decode")
CHANGED = (tl, tl.core, tl.standard, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)


@contextmanager
def interpreted(module_name: str = "triton") -> Iterator[ModuleType]:
    """A `vllm_evict.scores.<module_name>` that runs on CPU tensors, inside the `with` block."""
    with ExitStack() as stack:
        for namespace in CHANGED:
            stack.enter_context(_left_as_it_was(namespace))
        for module in (tl, tl.standard):
            for name, function in [*vars(module).items()]:
                if isinstance(function, JITFunction):
                    setattr(module, name, InterpretedFunction(function.fn))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(InterpreterBuilder, "create_dot", _dot_of_numbers)
        # Kept functions would look for names that an earlier block has taken back.
        patch.setattr(InterpretedFunction, "rewritten_fn", {})
        yield _import_interpreted(module_name)


@contextmanager
def _left_as_it_was(namespace: ModuleType | type) -> Iterator[None]:
    before = dict(vars(namespace))
    try:
        yield
    finally:
        for name in vars(namespace).keys() - before.keys():
            delattr(namespace, name)
        for name, value in before.items():
            if vars(namespace).get(name) is not value:
                setattr(namespace, name, value)


_create_dot = InterpreterBuilder.create_dot


def _dot_of_numbers(builder, a, b, *rest):
    if a.dtype == b.dtype == tl.bfloat16:
        a, b = (interpreter_builder.create_fp_ext(x, tl.float32) for x in (a, b))
    return _create_dot(builder, a, b, *rest)


def _import_interpreted(module_name: str) -> ModuleType:
    package = vllm_evict.scores
    before = {module: sys.modules.pop(f"{package.__name__}.{module}", None) for module in MODULES}
    attributes = {module: vars(package).pop(module, None) for module in MODULES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        wanted = importlib.import_module(f"{package.__name__}.{module_name}")
    for module in MODULES:
        sys.modules.pop(f"{package.__name__}.{module}", None)
        vars(package).pop(module, None)
        if before[module] is not None:
            sys.modules[f"{package.__name__}.{module}"] = before[module]
        if attributes[module] is not None:
            setattr(package, module, attributes[module])
    return wanted
