"""The command `kvlayers inspect`."""

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvlayers.tools.cli.exit_codes import one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

    from kvlayers.persistence import CacheFile


def inspect(
    file: Annotated[Path, typer.Argument(help="A file that save_cache() has written.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What a saved cache says of itself, without loading its states.

    Exits with 2 where it is no such file, or damaged.
    """
    # Late, as torch takes seconds to import, which `--help` need not wait for.
    from rich.console import Console

    from kvlayers.persistence import inspect_cache
    from kvlayers.tools.cli.output import print_json

    with one_line_errors("inspect"):
        seen = inspect_cache(file)
    if as_json:
        print_json(seen)
    else:
        Console().print(_table(seen))


def _table(seen: "CacheFile") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    from kvlayers.tools.cli.output import plain
    from kvlayers.utils.units import readable_bytes

    drawn = Table(show_header=False, box=None)
    drawn.add_column(style="dim")
    drawn.add_column(overflow="fold")
    groups = ((kind, len(list(same))) for kind, same in itertools.groupby(seen.layers))
    rows = {
        "cache": seen.kind,
        "layers": ", ".join(f"{count} x {kind}" for kind, count in groups),
        "tokens": str(seen.length),
        "batch": str(seen.batch_size),
        "bits": _bits(seen),
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
        # A file may say anything: none of it is markup.
        drawn.add_row(name, escape(content))
    return drawn


def _bits(seen: "CacheFile") -> str:
    """Bits and backend of the layers that are quantized, ranges of layers with the same ones together."""
    layers = enumerate(zip(seen.bits, seen.backends, strict=True))
    parts = []
    for (bits, backend), same in itertools.groupby(layers, key=lambda layer: layer[1]):
        indices = [index for index, _ in same]
        if bits is None:
            continue
        keys, values = bits
        said = f"{keys}" if keys == values else f"{keys} for keys, {values} for values"
        where = f"layers {indices[0]} to {indices[-1]}" if len(indices) > 1 else f"layer {indices[0]}"
        parts.append(f"{said} ({backend}) in {where}")
    return "; ".join(parts) or "full precision"


def _model(seen: "CacheFile") -> str:
    if seen.model is None:
        return "not said"
    known = (seen.model_name, seen.model_commit, seen.weights_id, seen.model.get("model_type"))
    return ", ".join(str(fact) for fact in known if fact)
