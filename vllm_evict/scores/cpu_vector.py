"""Vector instructions for the page-mass kernel, as LLVM IR inside Numba.

Numba vectorises plain loops when it likes to; here the width is spelled out, because all depends on
keeping the sums in registers, and because Numba knows neither bfloat16 nor float16. Each factory
returns a Numba intrinsic that takes addresses (int64) and is inlined into its caller; LLVM cuts the
vectors to what the machine has (AVX-512, AVX2, NEON).

No fast-math flags anywhere: lanes of unwritten slots may hold NaN and are dropped by `select`,
which is only safe without them.
"""

import functools

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import config
from numba.extending import intrinsic

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_ELEMENT_TYPES = {"float32": _F32, "float16": ir.HalfType(), "bfloat16": ir.IntType(16)}
ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

#: 2^f on [-0.5, 0.5], relative error 1.9e-9 before and 1.0e-7 after rounding to fp32 (Lawson fit; the error of exp2
#: below, against float64 over [-126, 0], is checked in the tests). The constant term is exactly 1: exp2(0) == 1.
_EXP2_COEFFICIENTS = (
    1.0,
    0.6931472057372664,
    0.24022646890627836,
    0.05550328776969191,
    0.00961848895778178,
    0.001339993121793359,
    0.00015345811824044056,
)
CACHE_LINE_BYTES = 64
_DIMS_PER_ITERATION = 2  # unroll of the loop over dims: halves its bookkeeping, more gains nothing


def max_lanes() -> int:
    """Tokens per vector, at most: 2 zmm, 2 ymm or 4 NEON registers of float32."""
    return 32 if _host_has_avx512() else 16


def max_tile_rows() -> int:
    """Query rows whose sums fit into registers: 8 x 2 of 32 zmm, 4 x 2 of 16 ymm, 4 x 4 of 32."""
    return 8 if _host_has_avx512() else 4


@functools.cache
def _host_has_avx512() -> bool:
    if config.CPU_FEATURES is not None:  # NUMBA_CPU_FEATURES overrides the host
        return "+avx512f" in config.CPU_FEATURES
    return bool(binding.get_host_cpu_features().get("avx512f", False))


# --- IR helpers: `b` is the IRBuilder, a "vec" is <lanes x float> ----------------------------------------------------


def _vector(element: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def _pointer(b: ir.IRBuilder, address: ir.Value, target: ir.Type) -> ir.Value:
    return b.inttoptr(address, target.as_pointer())


def _load(b: ir.IRBuilder, address: ir.Value, type_: ir.Type, align: int = 1) -> ir.Value:
    return b.load(_pointer(b, address, type_), align=align)


def _store(b: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    b.store(value, _pointer(b, address, value.type), align=4)


def _splat(b: ir.IRBuilder, scalar: ir.Value, lanes: int) -> ir.Value:
    undefined = ir.Constant(_vector(scalar.type, lanes), ir.Undefined)
    one = b.insert_element(undefined, scalar, _I32(0))
    return b.shuffle_vector(one, undefined, ir.Constant(_vector(_I32, lanes), [0] * lanes))


def _constant(value: float, lanes: int) -> ir.Constant:
    return ir.Constant(_vector(_F32, lanes), [value] * lanes)


def _call(b: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """Call llvm.NAME.vNf32; llvmlite cannot name intrinsics of vector types itself."""
    lanes = args[0].type.count
    full_name = f"llvm.{name}.v{lanes}f32"
    function = b.module.globals.get(full_name)
    if function is None:
        signature = ir.FunctionType(args[0].type, [a.type for a in args])
        function = ir.Function(b.module, signature, full_name)
    return b.call(function, args)


def _pick(b: ir.IRBuilder, vector: ir.Value, lanes: list[int]) -> ir.Value:
    mask = ir.Constant(_vector(_I32, len(lanes)), lanes)
    return b.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _larger(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def _fold(b: ir.IRBuilder, vector: ir.Value, combine) -> ir.Value:
    """Reduce a vector to a scalar by combining its halves."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        halves = (_pick(b, vector, list(range(lanes))), _pick(b, vector, list(range(lanes, 2 * lanes))))
        vector = combine(b, *halves)
    return b.extract_element(vector, _I32(0))


def _prefetch(b: ir.IRBuilder, address: ir.Value, num_bytes: int) -> None:
    """Fetch into the second-level cache: what is ahead would push what is at work out of the first."""
    byte, name = ir.IntType(8).as_pointer(), "llvm.prefetch.p0"
    function = b.module.globals.get(name)
    if function is None:
        signature = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        function = ir.Function(b.module, signature, name)
    read, second_level, data_cache = _I32(0), _I32(2), _I32(1)
    for line in range(0, num_bytes, CACHE_LINE_BYTES):
        at = b.inttoptr(b.add(address, _I64(line)), byte)
        b.call(function, [at, read, second_level, data_cache])


def _add(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.fadd(x, y)


def _exp2(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2^x for x <= 126, relative error 1.3e-7; exactly 0 below -127, so also for -inf."""
    lanes = x.type.count
    x = _larger(b, x, _constant(-127.0, lanes))
    whole = _call(b, "rint", x)
    fraction = b.fsub(x, whole)
    power = _constant(_EXP2_COEFFICIENTS[-1], lanes)
    for coefficient in reversed(_EXP2_COEFFICIENTS[:-1]):
        power = _call(b, "fma", power, fraction, _constant(coefficient, lanes))
    integers = _vector(_I32, lanes)
    exponent = b.add(b.fptosi(whole, integers), ir.Constant(integers, [127] * lanes))
    exponent = b.shl(exponent, ir.Constant(integers, [23] * lanes))  # 127 - 127 = 0 is the float 0.0
    return b.fmul(power, b.bitcast(exponent, x.type))


def _to_float(b: ir.IRBuilder, raw: ir.Value, element: str) -> ir.Value:
    """<n x element> -> <n x float>; bfloat16 is the upper half of a float32."""
    lanes = raw.type.count
    if element == "float32":
        return raw
    if element == "float16":
        return b.fpext(raw, _vector(_F32, lanes))
    integers = _vector(_I32, lanes)
    return b.bitcast(b.shl(b.zext(raw, integers), ir.Constant(integers, [16] * lanes)), _vector(_F32, lanes))


def _load_keys(b: ir.IRBuilder, address: ir.Value, element: str, lanes: int, interleave: int) -> list[ir.Value]:
    """`interleave` vecs: the next dims of `lanes` tokens, stored as [lanes, interleave]."""
    if element == "bfloat16" and interleave == 2:  # pairs of dims in one 32-bit word: two shifts less than a shuffle
        integers = _vector(_I32, lanes)
        words = _load(b, address, integers)
        low = b.shl(words, ir.Constant(integers, [16] * lanes))
        high = b.and_(words, ir.Constant(integers, [0xFFFF0000] * lanes))
        return [b.bitcast(half, _vector(_F32, lanes)) for half in (low, high)]
    raw = _load(b, address, _vector(_ELEMENT_TYPES[element], lanes * interleave))
    if interleave == 1:
        return [_to_float(b, raw, element)]
    return [
        _to_float(b, _pick(b, raw, list(range(i, lanes * interleave, interleave))), element) for i in range(interleave)
    ]


def _gather_keys(b: ir.IRBuilder, address: ir.Value, element: str, lanes: int, token_bytes: ir.Value) -> ir.Value:
    """One dim of `lanes` tokens that lie `token_bytes` apart (row-major K)."""
    raw = ir.Constant(_vector(_ELEMENT_TYPES[element], lanes), ir.Undefined)
    for lane in range(lanes):
        at = b.add(address, b.mul(token_bytes, _I64(lane)))
        raw = b.insert_element(raw, _load(b, at, _ELEMENT_TYPES[element]), _I32(lane))
    return _to_float(b, raw, element)


# --- intrinsics ------------------------------------------------------------------------------------------------------


def make_dot(element: str, max_rows: int, lanes: int, interleave: int, row_major: bool):
    """dot(rows, q, k, num_dims, step_bytes, ahead, out): out[r, t] = sum over d of q[d, r] * K[t, d].

    rows:       1 to max_rows; each number has its own loop, because the sums live in registers
    q:          address of float32 [num_dims, rows], the query rows packed dim by dim
    k:          address of the keys of `lanes` tokens
    num_dims:   head size
    step_bytes: from one dim (pair, four, if interleaved) to the next; row-major: token to token
    ahead:      address of the keys that come next, prefetched meanwhile
    out:        address of float32 [rows, lanes]
    """
    dims_per_load = 1 if row_major else interleave
    dims_per_iteration = 1 if row_major else max(_DIMS_PER_ITERATION, dims_per_load)

    def build_loop(b: ir.IRBuilder, rows, q, k, num_dims, step_bytes, ahead, out):
        entry, loop = b.block, b.append_basic_block(f"dims.of.{rows}.rows")
        b.branch(loop)
        b.position_at_end(loop)
        counters = [b.phi(_I64) for _ in range(4)]
        dim, q_now, k_now, ahead_now = counters
        for phi, start in zip(counters, (_I64(0), q, k, ahead), strict=True):
            phi.add_incoming(start, entry)
        carried = [b.phi(_vector(_F32, lanes)) for _ in range(rows)]
        for phi in carried:
            phi.add_incoming(_constant(0.0, lanes), entry)
        sums = list(carried)

        step = _I64(ELEMENT_BYTES[element]) if row_major else step_bytes
        for first in range(0, dims_per_iteration, dims_per_load):
            if row_major:
                keys = [_gather_keys(b, k_now, element, lanes, step_bytes)]
            else:
                keys = _load_keys(b, k_now, element, lanes, interleave)
                _prefetch(b, ahead_now, lanes * interleave * ELEMENT_BYTES[element])
            k_now, ahead_now = b.add(k_now, step), b.add(ahead_now, step)
            for i, key in enumerate(keys):
                for r in range(rows):
                    q_address = b.add(q_now, _I64(4 * ((first + i) * rows + r)))
                    q_value = _splat(b, _load(b, q_address, _F32, align=4), lanes)
                    sums[r] = _call(b, "fma", q_value, key, sums[r])

        dim = b.add(dim, _I64(dims_per_iteration))
        q_now = b.add(q_now, _I64(4 * dims_per_iteration * rows))
        for phi, value in zip(counters, (dim, q_now, k_now, ahead_now), strict=True):
            phi.add_incoming(value, loop)
        for phi, value in zip(carried, sums, strict=True):
            phi.add_incoming(value, loop)
        done = b.append_basic_block("dims.done")
        b.cbranch(b.icmp_signed("<", dim, num_dims), loop, done)
        b.position_at_end(done)
        for r, value in enumerate(sums):
            _store(b, value, b.add(out, _I64(4 * lanes * r)))

    def build(b: ir.IRBuilder, rows, *args):
        joined = b.append_basic_block("dot.done")
        switch = b.switch(rows, joined)
        for n in range(1, max_rows + 1):
            block = b.append_basic_block(f"dot.{n}.rows")
            switch.add_case(_I64(n), block)
            b.position_at_end(block)
            build_loop(b, n, *args)
            b.branch(joined)
        b.position_at_end(joined)

    @intrinsic
    def dot(typing_context, rows, q, k, num_dims, step_bytes, ahead, out):
        return _void_of(build, 7)

    return dot


def make_summarize(lanes: int):
    """summarize(logits, limit, softcap, peak_out, sum_out): max, and sum of exp2(logit - max).

    logits:   address of float32 [lanes], in units of log 2; with softcap see there
    limit:    number of lanes that count, the first ones; at least 1
    softcap:  float32 in units of log 2; 0 = none. Else `logits` holds x = log2(exp(2 y)), and the
              logit is softcap * tanh(y)
    peak_out, sum_out: addresses of one float32 each
    """

    def build(b: ir.IRBuilder, logits, limit, softcap, peak_out, sum_out):
        vec = _vector(_F32, lanes)
        raw = _load(b, logits, vec, align=4)
        entry, capped, joined = b.block, b.append_basic_block("softcap"), b.append_basic_block("softcap.done")
        b.cbranch(b.fcmp_ordered("!=", softcap, _F32(0.0)), capped, joined)
        b.position_at_end(capped)
        # tanh(y) = 1 - 2 / (exp(2 y) + 1), absolute error 1e-7
        twice = b.select(b.fcmp_ordered("<", raw, _constant(126.0, lanes)), raw, _constant(126.0, lanes))
        ratio = b.fdiv(_constant(2.0, lanes), b.fadd(_exp2(b, twice), _constant(1.0, lanes)))
        tamed = b.fmul(_splat(b, softcap, lanes), b.fsub(_constant(1.0, lanes), ratio))
        b.branch(joined)
        b.position_at_end(joined)
        value = b.phi(vec)
        value.add_incoming(raw, entry)
        value.add_incoming(tamed, capped)

        lane_numbers = ir.Constant(_vector(_I32, lanes), list(range(lanes)))
        counts = b.icmp_signed("<", lane_numbers, _splat(b, b.trunc(limit, _I32), lanes))
        visible = b.select(counts, value, _constant(float("-inf"), lanes))  # whatever the others hold, NaN too
        peak = _fold(b, visible, _larger)
        total = _fold(b, _exp2(b, b.fsub(visible, _splat(b, peak, lanes))), _add)
        _store(b, peak, peak_out)
        _store(b, total, sum_out)

    @intrinsic
    def summarize(typing_context, logits, limit, softcap, peak_out, sum_out):
        return _void_of(build, 5, floats=(2,))

    return summarize


def make_rescale(lanes: int = 16):
    """rescale(peaks, sums, peak): sums[i] *= exp2(peaks[i] - peak) for `lanes` values, in place."""

    def build(b: ir.IRBuilder, peaks, sums, peak):
        vec = _vector(_F32, lanes)
        shift = b.fsub(_load(b, peaks, vec, align=4), _splat(b, peak, lanes))
        _store(b, b.fmul(_load(b, sums, vec, align=4), _exp2(b, shift)), sums)

    @intrinsic
    def rescale(typing_context, peaks, sums, peak):
        return _void_of(build, 3, floats=(2,))

    return rescale


def make_load_as_float(element: str):
    """load_as_float(address) -> float32 value of one `element`."""

    @intrinsic
    def load_as_float(typing_context, address):
        def codegen(context, b, signature, args):
            raw = _load(b, args[0], _vector(_ELEMENT_TYPES[element], 1))
            return b.extract_element(_to_float(b, raw, element), _I32(0))

        return types.float32(types.int64), codegen

    return load_as_float


def make_to_float(element: str):
    """to_float(raw) -> float32 of one `element` as `storage_dtype` has it."""
    raw_type = types.float32 if element == "float32" else types.uint16

    @intrinsic
    def to_float(typing_context, raw):
        def codegen(context, b, signature, args):
            if element == "float32":
                return args[0]
            if element == "float16":
                return b.fpext(b.bitcast(args[0], ir.HalfType()), _F32)
            return b.bitcast(b.shl(b.zext(args[0], _I32), _I32(16)), _F32)

        return types.float32(raw_type), codegen

    return to_float


def storage_dtype(element: str):
    """What an array of `element` is called in NumPy, which has no bfloat16."""
    return np.float32 if element == "float32" else np.uint16


@intrinsic
def fetch_add(typing_context, address, amount):
    """Add to the int64 at `address` as one step that no other thread can split; returns what was there before."""

    def codegen(context, b, signature, args):
        return b.atomic_rmw("add", _pointer(b, args[0], _I64), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def prefetch(typing_context, address):
    """Fetch the cache line at `address` ahead of its use."""
    return _void_of(functools.partial(_prefetch, num_bytes=1), 1)


@intrinsic
def as_pointer(typing_context, address):
    """An int64 address as the void pointer that numba.carray wants."""

    def codegen(context, b, signature, args):
        return b.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


def _void_of(build, num_args: int, floats: tuple[int, ...] = ()):
    """Signature and code generator of an intrinsic that returns nothing; args are int64 but for `floats` (float32)."""

    def codegen(context, b, signature, args):
        build(b, *args)
        return context.get_dummy_value()

    argument_types = [types.float32 if i in floats else types.int64 for i in range(num_args)]
    return types.void(*argument_types), codegen
