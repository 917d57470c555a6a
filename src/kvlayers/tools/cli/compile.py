"""The command `kvlayers compile`."""

import time

from rich.console import Console

from kvlayers.tools.cli.exit_codes import CHECK_FAILED, one_line_errors


def compile_command() -> None:
    """Compile the kernels for this CPU now, so that no script waits for them. It takes about half a minute, once.

    Nothing is compiled if the kernels are in the wheel, or were compiled before. Exits with 1 if the compiler fails.
    """
    # Imported late: torch takes seconds to import, and `--help` does not need it.
    from kvlayers.errors import KernelError
    from kvlayers.tools.kernels import LIBRARIES

    console = Console()
    with one_line_errors("compile", errors=KernelError, code=CHECK_FAILED):
        for library in LIBRARIES:
            began = time.monotonic()
            with console.status(f"compiling the kernel for {library.purpose}"):
                path = library.compile()
            seconds = time.monotonic() - began
            console.print(f"{library.purpose}: {path} ({seconds:.1f} s)", highlight=False, soft_wrap=True)
