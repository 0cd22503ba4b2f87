"""Model Runner V2 on a CPU: Triton's interpreter in place of a GPU.

To be deleted when the environment has a Triton CPU backend.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

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
    _leave_overflow_alone(interpreter)


@contextmanager
def torch_twins() -> Iterator[None]:
    """Our kernels' torch twins in place of the interpreter: half of the time that it takes goes to them."""
    from peagle_kernels import dispatch

    with patch.object(dispatch, "INTERPRETED", False):
        yield


def _keep_dtype_of_splat(interpreter: Any) -> None:
    """A splat of a scalar keeps the scalar's dtype even where the result type says otherwise.

    Triton 3.6's interpreter labels a comparison of scalars with its operands' dtype, so a splat of the
    bool becomes a splat of floats and a later ``tl.where`` refuses it. Probabilistic drafts hit this.
    """

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        value = arg.data[0] if isinstance(arg.dtype, interpreter.tl.block_type) else arg.data
        dtype = np.asarray(arg.data).dtype
        return interpreter.TensorHandle(np.full(ret_ty.shape, value, dtype=dtype), ret_ty.scalar)

    interpreter.InterpreterBuilder.create_splat = create_splat


def _give_libdevice_log1p(interpreter: Any) -> None:
    """``libdevice.log1p`` is an empty stub unless a backend fills it in; vLLM's residual resampling calls it."""
    from triton.language.extra import libdevice

    def log1p(x: Any) -> Any:
        return interpreter.tl.core.tensor(interpreter.TensorHandle(np.log1p(x.handle.data), x.dtype.scalar), x.type)

    libdevice.log1p = log1p


def _patch_language_once(interpreter: Any) -> None:
    """For speed alone: the interpreter patches triton.language again at each launch and each call of a function."""
    patch_lang, languages = interpreter._patch_lang, (interpreter.tl, interpreter.tl.core)
    patched, known = set[Any](), set[Any]()

    def _patch_lang(fn: Any) -> Any:
        if fn not in known:
            known.add(fn)
            mine = {m for m in fn.__globals__.values() if any(m is lang for lang in languages)}
            if not mine or not mine <= patched:
                patch_lang(fn)
                patched.update(mine)
        return interpreter._LangPatchScope()  # of no changes: nothing is restored

    interpreter._patch_lang = _patch_lang


def _make_dtypes_once(interpreter: Any) -> None:
    """For speed alone: a table of twenty dtypes is made for each operation."""
    tl, get_np_dtype = interpreter.tl, interpreter._get_np_dtype
    dtypes = dict[str, Any]()

    def _get_np_dtype(dtype: Any) -> Any:
        if isinstance(dtype, tl.block_type):
            return _get_np_dtype(dtype.element_ty)
        if isinstance(dtype, tl.pointer_type):
            return get_np_dtype(dtype)
        if dtype.name not in dtypes:
            dtypes[dtype.name] = get_np_dtype(dtype)
        return dtypes[dtype.name]

    interpreter._get_np_dtype = _get_np_dtype


def _leave_overflow_alone(interpreter: Any) -> None:
    """For speed alone: a third of the time goes to checks for overflow, which raise in debug mode only."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
