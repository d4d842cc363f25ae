"""Run lowered GPU kernels on a CPU: take the Triton IR out of a jitted function and execute it.

The plain interpreter runs what the kernel was traced to; this runs what it was lowered to, with
pointers as (argument, offset). It reports reads and writes out of bounds, elements that two
programs write, and outputs that no program writes. Only operations that kernels here use.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jax._src.lib.mlir import ir
from jaxlib.triton import dialect as triton_dialect

TARGET = "__gpu$xla.gpu.triton"
NARROW = {
    "i1": np.bool_,
    "i8": np.int8,
    "i16": np.int16,
    "i32": np.int32,
    "i64": np.int64,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f8E4M3FN": ml_dtypes.float8_e4m3fn,
    "f8E5M2": ml_dtypes.float8_e5m2,
}
COMPARE_INTEGERS = ("eq", "ne", "slt", "sle", "sgt", "sge", "ult", "ule", "ugt", "uge")
COMPARE_FLOATS = tuple(
    [
        "false",
        "oeq",
        "ogt",
        "oge",
        "olt",
        "ole",
        "one",
        "ord",
        "ueq",
        "ugt",
        "uge",
        "ult",
        "ule",
        "une",
        "uno",
        "true",
    ]
)
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
ELEMENTWISE = {
    "arith.addi": np.add,
    "arith.addf": np.add,
    "arith.subi": np.subtract,
    "arith.subf": np.subtract,
    "arith.muli": np.multiply,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.divsi": lambda a, b: np.trunc(np.asarray(a, np.float64) / b),
    "arith.remsi": np.fmod,
    "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or,
    "arith.xori": np.bitwise_xor,
    "arith.shli": np.left_shift,
    "arith.shrsi": np.right_shift,
    "arith.maxsi": np.maximum,
    "arith.minsi": np.minimum,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin,
    "arith.negf": np.negative,
    "math.exp": np.exp,
    "math.log": np.log,
    "math.absf": np.abs,
    "math.sin": np.sin,
    "math.cos": np.cos,
}
UNSIGNED = {
    "arith.extui": np.asarray,
    "arith.uitofp": np.asarray,
    "arith.shrui": np.right_shift,
    "arith.divui": np.floor_divide,
    "arith.remui": np.remainder,
    "arith.minui": np.minimum,
    "arith.maxui": np.maximum,
}
CONVERSIONS = (
    "arith.extsi",
    "arith.sitofp",
    "arith.trunci",
    "arith.truncf",
    "arith.extf",
    "arith.fptosi",
    "tt.fp_to_fp",
)
FUNCTIONS = {"exp": np.exp, "log": np.log, "sin": np.sin, "cos": np.cos, "fabs": np.abs}


class KernelFault(Exception):
    """A program touched what it must not."""


@dataclasses.dataclass(frozen=True)
class Pointer:
    """Elements of one argument, flat offsets."""

    argument: int
    offset: Any

    def map(self, function: Callable) -> "Pointer":
        """The pointer with its offsets changed."""
        return Pointer(self.argument, function(self.offset))


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a lowered function."""

    module: Any
    grid: tuple[int, int, int]


def kernels(lowered) -> list[Kernel]:
    """Every Triton kernel of `jax.jit(f).trace(...).lower(lowering_platforms=("cuda",))`."""
    found = []

    def walk(operation) -> None:
        for region in operation.regions:
            for block in region.blocks:
                for op in block.operations:
                    if op.operation.name == "stablehlo.custom_call":
                        found.extend(_kernel(op.operation))
                    walk(op.operation)

    walk(lowered.compiler_ir("stablehlo").operation)
    return found


def _kernel(call) -> list[Kernel]:
    if ir.StringAttr(call.attributes["call_target_name"]).value != TARGET:
        return []
    config = {n.name: n.attr for n in ir.DictAttr(call.attributes["mhlo.backend_config"])}
    context = ir.Context()
    triton_dialect.register_dialect(context)
    context.load_all_available_dialects()
    with context:
        module = ir.Module.parse(ir.StringAttr(config["ir"]).value_bytes)
    x, y, z = (ir.IntegerAttr(config[f"grid_{axis}"]).value for axis in "xyz")
    return [Kernel(module, (x, y, z))]


def run(kernel: Kernel, inputs: Sequence[np.ndarray], outputs) -> list[np.ndarray]:
    """Run all programs of the grid.

    Args:
        kernel: one of `kernels`.
        inputs: arrays of the arguments.
        outputs: shape and dtype of each output.

    Raises:
        KernelFault: an access out of bounds, an element written twice or not at all.
    """
    machine = _Machine(inputs, outputs)
    (function,) = kernel.module.body.operations
    block = function.regions[0].blocks[0]
    X, Y, Z = kernel.grid
    for program in np.ndindex(Z, Y, X):
        machine.program = program[::-1]
        machine.number += 1
        machine.run(block, {x: Pointer(i, np.int64(0)) for i, x in enumerate(block.arguments)})
    for i in range(len(inputs), len(machine.buffers)):
        missing = int((machine.writer[i] < 0).sum())
        if missing:
            raise KernelFault(f"{missing} elements of output {i - len(inputs)} were never written")
    return machine.buffers[len(inputs) :]


class _Machine:
    """Memory, the current program, and one method a group of operations."""

    def __init__(self, inputs, outputs):
        self.buffers = [np.ascontiguousarray(x).copy() for x in inputs]
        self.buffers += [np.zeros(x.shape, x.dtype) for x in outputs]
        self.writer = [np.full(x.size, -1) for x in self.buffers]
        self.program, self.number = (0, 0, 0), -1

    def run(self, block, values) -> list:
        """Run a block with `values` of what it sees; returns what it yields."""
        for op in block.operations:
            op = op.operation
            operands = [values[x] for x in op.operands]
            if op.name in ("scf.yield", "tt.return", "tt.reduce.return", "scf.condition"):
                return operands
            with np.errstate(all="ignore"):
                results = self.apply(op, operands, values)
            results = results if isinstance(results, tuple) else (results,)
            values.update(zip(op.results, results, strict=True))
        return []

    def apply(self, op, x, values):
        """Results of one operation."""
        handler = getattr(self, op.name.replace(".", "_"), None)
        if handler is not None:
            return handler(op, x, values)
        _, dtype = _result(op)
        if op.name in ELEMENTWISE:
            return np.asarray(ELEMENTWISE[op.name](*x)).astype(dtype)
        if op.name in CONVERSIONS:
            return np.asarray(x[0]).astype(dtype)
        if op.name in UNSIGNED:
            return np.asarray(UNSIGNED[op.name](*map(_unsigned, x))).astype(dtype)
        raise NotImplementedError(f"{op.name}: {op}")

    # Shapes and constants

    def arith_constant(self, op, x, values):
        shape, dtype = _result(op)
        value = op.attributes["value"]
        if not isinstance(value, ir.DenseElementsAttr):
            return np.asarray(value.value).astype(dtype)
        if value.is_splat:
            return np.full(shape, value.get_splat_value().value).astype(dtype)
        return np.array(value).astype(dtype).reshape(shape)

    def tt_get_program_id(self, op, x, values):
        return np.int32(self.program[ir.IntegerAttr(op.attributes["axis"]).value])

    def tt_make_range(self, op, x, values):
        start, end = (ir.IntegerAttr(op.attributes[k]).value for k in ("start", "end"))
        return np.arange(start, end, dtype=np.int32)

    def tt_splat(self, op, x, values):
        shape, _ = _result(op)
        return _each(x[0], lambda a: np.full(shape, a))

    def tt_broadcast(self, op, x, values):
        shape, _ = _result(op)
        return _each(x[0], lambda a: np.broadcast_to(a, shape))

    def tt_reshape(self, op, x, values):
        shape, _ = _result(op)
        return _each(x[0], lambda a: np.reshape(a, shape))

    def tt_expand_dims(self, op, x, values):
        axis = ir.IntegerAttr(op.attributes["axis"]).value
        return _each(x[0], lambda a: np.expand_dims(a, axis))

    def tt_trans(self, op, x, values):
        return np.transpose(x[0], list(ir.DenseI32ArrayAttr(op.attributes["order"])))

    # Memory

    def tt_addptr(self, op, x, values):
        return x[0].map(lambda a: np.asarray(a, np.int64) + np.asarray(x[1], np.int64))

    def tt_load(self, op, x, values):
        pointer, mask, other = (*x, None, None)[:3]
        offset, allowed = self._access(pointer, mask, "read")
        buffer = self.buffers[pointer.argument].reshape(-1)
        loaded = buffer[np.where(allowed, offset, 0)]
        return np.where(allowed, loaded, np.asarray(0 if other is None else other, loaded.dtype))

    def tt_store(self, op, x, values):
        pointer, value, mask = (*x, None)[:3]
        offset, allowed = self._access(pointer, mask, "write")
        where = offset[allowed]
        writer = self.writer[pointer.argument]
        if (writer[where] >= 0).any() or len(set(where.tolist())) < where.size:
            raise KernelFault(f"program {self.program} writes argument {pointer.argument} again")
        writer[where] = self.number
        buffer = self.buffers[pointer.argument].reshape(-1)
        buffer[where] = np.broadcast_to(value, offset.shape)[allowed]
        return ()

    def _access(self, pointer: Pointer, mask, what: str):
        offset = np.asarray(pointer.offset)
        allowed = np.broadcast_to(True if mask is None else mask, offset.shape)
        size = self.buffers[pointer.argument].size
        outside = allowed & ((offset < 0) | (offset >= size))
        if outside.any():
            raise KernelFault(
                f"program {self.program}: {what} out of bounds of argument {pointer.argument} "
                f"of {size} elements: {np.unique(offset[outside])[:5]}"
            )
        return offset, allowed

    # Arithmetic that is not elementwise, or not by one function

    def tt_dot(self, op, x, values):
        a, b, start = x
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(start.dtype) + start

    def tt_reduce(self, op, x, values):
        axis = ir.IntegerAttr(op.attributes["axis"]).value
        body = op.regions[0].blocks[0]
        total = [np.take(a, 0, axis) for a in x]
        for i in range(1, x[0].shape[axis]):
            terms = total + [np.take(a, i, axis) for a in x]
            total = self.run(body, values | dict(zip(body.arguments, terms, strict=True)))
        return tuple(total)

    def tt_bitcast(self, op, x, values):
        return x[0] if isinstance(x[0], Pointer) else np.asarray(x[0]).view(_result(op)[1])

    arith_bitcast = tt_bitcast

    def tt_extern_elementwise(self, op, x, values):
        symbol = ir.StringAttr(op.attributes["symbol"]).value.removeprefix("__nv_")
        function = FUNCTIONS[symbol if symbol in FUNCTIONS else symbol.removesuffix("f")]
        return np.asarray(function(*x)).astype(_result(op)[1])

    def arith_select(self, op, x, values):
        return np.where(x[0], x[1], x[2])

    def arith_cmpi(self, op, x, values):
        name = COMPARE_INTEGERS[ir.IntegerAttr(op.attributes["predicate"]).value]
        a, b = (_unsigned(v) for v in x) if name[0] == "u" else x
        return COMPARE[name if name in COMPARE else name[1:]](a, b)

    def arith_cmpf(self, op, x, values):
        name = COMPARE_FLOATS[ir.IntegerAttr(op.attributes["predicate"]).value]
        result = COMPARE[name[1:]](x[0], x[1])
        if name[0] == "u":
            return result | np.isnan(x[0]) | np.isnan(x[1])
        return result & ~(np.isnan(x[0]) | np.isnan(x[1]))

    # Control

    def scf_for(self, op, x, values):
        first, last, step = (int(v) for v in x[:3])
        carried, body = x[3:], op.regions[0].blocks[0]
        for i in range(first, last, step):
            given = [np.asarray(i, np.asarray(x[0]).dtype), *carried]
            carried = self.run(body, values | dict(zip(body.arguments, given, strict=True)))
        return tuple(carried)

    def scf_while(self, op, x, values):
        before, after = (region.blocks[0] for region in op.regions)
        while True:
            go_on, *x = self.run(before, values | dict(zip(before.arguments, x, strict=True)))
            if not bool(go_on):
                return tuple(x)
            x = self.run(after, values | dict(zip(after.arguments, x, strict=True)))

    def scf_if(self, op, x, values):
        region = op.regions[0 if bool(x[0]) else 1]
        return tuple(self.run(region.blocks[0], dict(values))) if len(region.blocks) else ()


def _result(op) -> tuple[tuple[int, ...], Any]:
    """Shape and NumPy dtype of the first result; of a pointer only the shape counts."""
    kind = op.results[0].type
    if isinstance(kind, ir.RankedTensorType):
        return tuple(kind.shape), NARROW.get(str(kind.element_type))
    return (), NARROW.get(str(kind))


def _each(x, function: Callable):
    return x.map(function) if isinstance(x, Pointer) else function(np.asarray(x))


def _unsigned(x) -> np.ndarray:
    x = np.asarray(x)
    return x if x.dtype == np.bool_ else x.view(x.dtype.str.replace("i", "u"))
