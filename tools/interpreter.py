"""Model Runner V2 on a CPU: Triton's interpreter in place of a GPU.

To be deleted when the environment has a Triton CPU backend.
"""

import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np


def is_enabled() -> bool:
    import triton.backends

    return "cpu" in triton.backends.backends


def enable() -> None:
    """Let vLLM take Triton for usable. Call once, before vLLM is imported."""
    import triton.backends
    from triton.runtime import interpreter

    if is_enabled():
        return
    assert not any(name.startswith("vllm.triton_utils") for name in sys.modules), "vLLM was imported already"
    # vLLM checks no more than that Triton has a "cpu" backend; this one compiles for no target.
    compiler = SimpleNamespace(supports_target=lambda target: False)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=None, compiler=compiler)
    _keep_dtype_of_splat(interpreter)
    _give_libdevice_log1p(interpreter)
    _patch_language_once(interpreter)
    _make_dtypes_once(interpreter)
    # For speed alone: a third of the time goes to checks for overflow, which raise in debug mode only.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)


def _keep_dtype_of_splat(interpreter: Any) -> None:
    """A splat of a scalar keeps the scalar's dtype even where the result type says otherwise.

    Triton 3.6's interpreter labels a comparison of scalars with its operands' dtype, so a splat of the
    bool becomes a splat of floats and a later ``tl.where`` refuses it. Probabilistic drafts hit this.
    """

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        return interpreter.TensorHandle(np.full(ret_ty.shape, np.ravel(arg.data)[0]), ret_ty.scalar)

    interpreter.InterpreterBuilder.create_splat = create_splat


def _give_libdevice_log1p(interpreter: Any) -> None:
    """``libdevice.log1p`` is an empty stub unless a backend fills it in; vLLM's residual resampling calls it."""
    from triton.language.extra import libdevice

    def log1p(x: Any) -> Any:
        return interpreter.tl.core.tensor(interpreter.TensorHandle(np.log1p(x.handle.data), x.dtype.scalar), x.type)

    libdevice.log1p = log1p


def _patch_language_once(interpreter: Any) -> None:
    """For speed alone: the interpreter patches triton.language again at each launch and each call of a function."""
    patch_lang = interpreter._patch_lang

    @cache
    def _patch_lang(fn: Any) -> Any:
        patch_lang(fn)
        return interpreter._LangPatchScope()  # of no changes: nothing is restored

    interpreter._patch_lang = _patch_lang


def _make_dtypes_once(interpreter: Any) -> None:
    """For speed alone: a table of twenty dtypes is made for each operation."""
    get_np_dtype, dtypes = interpreter._get_np_dtype, dict[str, Any]()

    def _get_np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = get_np_dtype(dtype)
        return dtypes[name]

    interpreter._get_np_dtype = _get_np_dtype
