"""Compiles the kernels for this CPU ahead of time."""

from pathlib import Path

from kvlayers.kernels.attention.cpu import kernel
from kvlayers.kernels.codes import cpu_packing as pack

LIBRARIES = (kernel.LIBRARY, kernel.MANY, kernel.WHOLE, pack.LIBRARY, kernel.OTHER)


def compile_kernels() -> dict[str, Path]:
    """Compile the kernels for this CPU, unless they are in the wheel or were compiled before: about half a minute.

    Of several processes, one compiles, and the others wait for it.

    Returns:
        The file that is used for each purpose.

    Raises:
        KernelError: there is no compiler, it fails, or the cache directory is not writable.

    Example:
        >>> import kvlayers
        >>> sorted(kvlayers.compile_kernels())
        ['attention', 'codes of 4 and 8 bits', 'other codes', 'packing', 'prompts']
    """
    return {library.purpose: library.compile() for library in LIBRARIES}
