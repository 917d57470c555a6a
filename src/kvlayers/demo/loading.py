"""A model brought up for a command, with bars while it comes."""

from pathlib import Path

import torch
from rich.console import Console

from .model import LoadedModel, find_model, load_model
from .report import loading_bars


def load(
    console: Console, given: str | None, dtype: torch.dtype, device: torch.device, origin: str = "--model"
) -> LoadedModel:
    """The model that is wanted, ready to generate.

    Args:
        console: where the bars are drawn.
        given: directory or hub name, `None` for the demo's model.
        dtype: of its weights.
        device: where it runs.
        origin: what a user calls the argument with the name.

    Raises:
        ModelError: there is no such model.
    """
    with loading_bars(console) as bars:
        name = find_model(given, bars, origin)
        if Path(name).is_dir():
            return load_model(name, dtype, device, bars)
    # Downloads draw bars of their own, which would write over ours.
    console.print(f"Asking the hub for {name}", highlight=False, markup=False)
    return load_model(name, dtype, device)
