"""The command line: `kvlayers`, or `python -m kvlayers`."""

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Annotated

from kvlayers.upstream.supported import check_installed

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command line, or print what is not installed."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f'kvlayers: the commands need {" and ".join(missing)}: pip install "kvlayers[cli]"', file=sys.stderr)
        raise SystemExit(2)
    try:
        check_installed()
    except ImportError as error:
        print(f"kvlayers: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # What a command measures must not depend on when a compiler is done.
    os.environ.setdefault("KVLAYERS_COMPILE", "wait")
    make_app()()


def make_app() -> "typer.Typer":
    """The command line with all its commands. No command imports torch before it is run."""
    import typer

    from kvlayers.tools.cli.bench import bench
    from kvlayers.tools.cli.calibrate import calibrate
    from kvlayers.tools.cli.demo import demo
    from kvlayers.tools.cli.fidelity import fidelity
    from kvlayers.tools.cli.inspect import inspect
    from kvlayers.tools.cli.plan import plan
    from kvlayers.tools.cli.small_commands import FOR_THE_HARNESS, compile_command, lm_eval
    from kvlayers.version import __version__

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"kvlayers {__version__}")
            raise typer.Exit

    app = typer.Typer(name="kvlayers", no_args_is_help=True, pretty_exceptions_show_locals=False)

    @app.callback()
    def kvlayers(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        """A drop-in key-value cache library for Hugging Face transformers."""

    for command in (plan, bench, fidelity, calibrate, inspect, demo):
        app.command()(command)
    app.command("compile")(compile_command)
    app.command("lm-eval", context_settings=FOR_THE_HARNESS)(lm_eval)
    return app


if __name__ == "__main__":
    main()
