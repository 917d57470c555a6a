"""The command `kvlayers inspect`."""

import itertools
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..amounts import readable_bytes
from ..persistence import CacheFile, inspect_cache
from .failing import one_line_errors
from .output import plain, print_json


def inspect(
    file: Annotated[Path, typer.Argument(help="A file that save_cache() has written.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a saved cache says of itself, without loading its states.

    Exits with 2 where it is no such file, or damaged.
    """
    with one_line_errors("inspect"):
        seen = inspect_cache(file)
    if as_json:
        print_json(seen)
    else:
        Console().print(_table(seen))


def _table(seen: CacheFile) -> Table:
    drawn = Table(show_header=False, box=None)
    drawn.add_column(style="dim")
    drawn.add_column(overflow="fold")
    groups = ((kind, len(list(same))) for kind, same in itertools.groupby(seen.layers))
    rows = {
        "cache": seen.kind,
        "layers": ", ".join(f"{count} x {kind}" for kind, count in groups),
        "tokens": str(seen.length),
        "batch": str(seen.batch_size),
        "dtype of states": str(plain(seen.dtype) or "several"),
        "size of the file": readable_bytes(seen.nbytes),
        "token ids": "in the file" if seen.has_token_ids else "not in the file",
        "loaded with": "the config of the model" if seen.needs_config else "nothing else",
        "first tokens alone": "can be loaded" if seen.has_prefixes else "cannot be loaded",
        "model": _model(seen),
        "made by": ", ".join(f"{package} {version}" for package, version in seen.versions.items()),
        "fingerprint": seen.fingerprint,
        "checksum": seen.checksum,
    }
    for name, content in rows.items():
        drawn.add_row(name, content)
    return drawn


def _model(seen: CacheFile) -> str:
    if seen.model is None:
        return "not said"
    known = (seen.model_name, seen.model_commit, seen.weights_id, seen.model.get("model_type"))
    return ", ".join(str(fact) for fact in known if fact)
