"""Calls of compiled functions by address.

Numba compiles a function again into everything that calls it, and a parallel loop twice. A large kernel
that its parallel loop calls by address is compiled once, which saves seconds at the first start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature

from ._simd_features import jit_disabled


def compiled_address(function: Any, kind: Any) -> Any:
    """Address of an njit function compiled for the signature `kind`; without the JIT the function itself."""
    if jit_disabled():
        return function
    compiled = function.overloads[kind.args]
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)


def indirect_call(kind: Any) -> Callable[..., None]:
    """An operation `call(address, *arguments)` for functions of the signature `kind`, without a result."""

    def call(address: Any, *arguments: Any) -> None:
        address(*arguments)

    class Template(AbstractTemplate):
        key = call

        def generic(self, args: Any, kws: Any) -> Any:
            return signature(types.void, types.intp, *kind.args) if len(args) == len(kind.args) + 1 else None

    infer_global(call, types.Function(Template))

    @lower_builtin(call, types.VarArg(types.Any))
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        convention = context.call_conv
        pointee = convention.get_function_type(types.void, sig.args[1:])
        target = builder.inttoptr(args[0], pointee.as_pointer())
        convention.call_function(builder, target, types.void, sig.args[1:], args[1:])
        return context.get_dummy_value()

    return call
