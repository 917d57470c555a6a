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
    if sys.argv[1:2] != ["run"]:
        # What a command measures must not depend on when a compiler is done.
        os.environ.setdefault("KVLAYERS_COMPILE", "wait")
    make_app()()


def make_app() -> "typer.Typer":
    """The command line with all its commands. No command imports torch before it is run."""
    import typer

    from kvlayers.tools.cli import commands
    from kvlayers.tools.cli.fidelity import fidelity
    from kvlayers.version import __version__

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"kvlayers {__version__}")
            raise typer.Exit

    app = typer.Typer(
        name="kvlayers", no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_show_locals=False
    )

    @app.callback()
    def kvlayers(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        """A drop-in key-value cache library for Hugging Face transformers."""

    for command in (commands.plan, commands.bench, fidelity, commands.calibrate, commands.inspect, commands.demo):
        app.command()(command)
    app.command(context_settings={"allow_interspersed_args": False})(commands.run)
    app.command("compile")(commands.compile_command)
    app.command("lm-eval", context_settings=commands.FOR_THE_HARNESS)(commands.lm_eval)
    return app


if __name__ == "__main__":
    main()
