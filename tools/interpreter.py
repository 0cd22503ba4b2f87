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
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    if is_enabled():
        return
    assert not any(name.startswith("vllm.triton_utils") for name in sys.modules), "vLLM was imported already"
    # vLLM checks no more than that Triton has a "cpu" backend; this one compiles for no target.
    compiler = SimpleNamespace(supports_target=lambda target: False)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=None, compiler=compiler)

    def create_splat(self: Any, ret_ty: Any, arg: Any) -> Any:
        """A splat of a scalar keeps the scalar's dtype even where the result type says otherwise.

        Triton 3.6's interpreter labels a comparison of scalars with its operands' dtype, so a splat of the
        bool becomes a splat of floats and a later ``tl.where`` refuses it. Probabilistic drafts hit this.
        """
        return interpreter.TensorHandle(np.full(ret_ty.shape, np.ravel(arg.data)[0]), ret_ty.scalar)

    def log1p(x: Any) -> Any:
        """``libdevice.log1p`` is an empty stub unless a backend fills it in; vLLM's residual resampling calls it."""
        return interpreter.tl.core.tensor(interpreter.TensorHandle(np.log1p(x.handle.data), x.dtype.scalar), x.type)

    # The rest is for speed alone.
    patch_lang, get_np_dtype, dtypes = interpreter._patch_lang, interpreter._get_np_dtype, dict[str, Any]()

    @cache
    def patch_lang_once(fn: Any) -> Any:
        """The interpreter patches triton.language again at each launch and each call of a function."""
        patch_lang(fn)
        return interpreter._LangPatchScope()  # of no changes: nothing is restored

    def kept_np_dtype(dtype: Any) -> Any:
        """A table of twenty dtypes is made for each operation."""
        name = dtype.scalar.name
        if name not in dtypes:
            dtypes[name] = get_np_dtype(dtype)
        return dtypes[name]

    interpreter.InterpreterBuilder.create_splat, libdevice.log1p = create_splat, log1p
    interpreter._patch_lang, interpreter._get_np_dtype = patch_lang_once, kept_np_dtype
    # A third of the time goes to checks for overflow, which raise in debug mode only.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
