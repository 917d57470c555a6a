"""Lets triton's interpreter leave out what it does over and over, which is most of its time.

Only for processes that do nothing but interpret kernels.
"""

import dataclasses
import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hurry() -> None:
    """Interpret kernels with the same results as before."""
    # Sums are checked for overflow, in several operations for each one, and the outcome is asserted only in debug mode.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # numpy makes a table of all of its dtypes at each question for one.
    found = functools.cache(interpreter._get_np_dtype)
    pointer = interpreter._get_np_dtype(tl.pointer_type(tl.int8))

    def dtype_of(dtype: Any) -> Any:
        return pointer if isinstance(dtype.scalar, tl.pointer_type) else found(dtype.scalar)

    interpreter._get_np_dtype = dtype_of
    # The functions of `triton.language` are replaced at each call of a function of a kernel. All but the first call
    # within a launch find that hundreds of functions have been replaced before.
    patch = interpreter._patch_lang
    patched: dict[frozenset[str], Any] = {}

    def first(function: Any) -> Any:
        languages = frozenset(
            value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core
        )
        if languages not in patched:
            patched[languages] = type(patch(function))
        # A scope with nothing to restore, or `None` with the versions of triton that restore nothing.
        return patched[languages]()

    interpreter._patch_lang = first
