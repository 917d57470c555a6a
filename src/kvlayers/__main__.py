"""The command line: `kvlayers`, or `python -m kvlayers`."""

import importlib.metadata
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Annotated

from kvlayers.upstream.supported import check_installed

if TYPE_CHECKING:
    import typer

GROUP = "kvlayers.commands"
"""Entry points of packages that have commands of their own: functions that take the `typer.Typer` of `kvlayers`."""


def main() -> None:
    """Run the command line, or print what is not installed."""
    missing = [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"kvlayers: the commands need {' and '.join(missing)}: pip install {' '.join(missing)}", file=sys.stderr)
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

    from kvlayers.commands import commands
    from kvlayers.version import __version__

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"kvlayers {__version__}")
            raise typer.Exit

    app = typer.Typer(
        name="kvlayers", no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_show_locals=False
    )
    for command in (commands.plan, commands.inspect):
        app.command(command.__name__)(command)
    app.command("run", context_settings={"allow_interspersed_args": False})(commands.run)
    app.command("compile")(commands.compile_command)
    add_commands_of_packages(app)
    found = {command.name for command in app.registered_commands}
    missing = [name for name in commands.OF_THE_LAB if name not in found]
    for name in missing:
        app.command(name, hidden=True, context_settings=commands.ANY_ARGUMENTS)(commands.not_installed)

    @app.callback(epilog=f"More commands, {', '.join(missing)}: {commands.GET_THE_LAB}" if missing else None)
    def kvlayers(
        version: Annotated[
            bool,
            typer.Option(
                "--version", metavar=commands.FLAG, callback=show_version, is_eager=True, help="Show the version."
            ),
        ] = False,
    ) -> None:
        """A drop-in key-value cache library for Hugging Face transformers."""

    return app


def add_commands_of_packages(app: "typer.Typer") -> None:
    """Let each entry point of the group `kvlayers.commands`, a function, add commands to `app`.

    A package that cannot be imported, or whose function fails, is one line on stderr: the other commands work.
    """
    for point in importlib.metadata.entry_points(group=GROUP):
        try:
            point.load()(app)
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            print(f"kvlayers: the commands of {point.value} are not there: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
