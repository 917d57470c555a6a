"""Triton, for the modules that hold its kernels. It imports triton: only a launch imports one of these modules."""

# mypy: ignore-errors
# triton has no types.

try:
    import triton
    import triton.language as tl
except ImportError:  # Tools that import every module, such as a collector of doctests, may still import those.
    triton = tl = None


def jit(function):
    """Decorator of a function of kernels."""
    return function if triton is None else triton.jit(function)
