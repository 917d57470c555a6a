"""A model brought up for a command, with bars while it comes."""

from pathlib import Path

import torch
from rich.console import Console

from kvlayers.tools.demo.model import FoundModel, LoadedModel, find_model, load_weights, read_config
from kvlayers.tools.demo.report import loading_bars


def find(console: Console, given: str | None, origin: str = "--model") -> FoundModel:
    """The config and the tokenizer of the model that is wanted: enough to check all else before weights are loaded.

    Args:
        console: where the bars are drawn.
        given: directory or hub name, `None` for the demo's model.
        origin: what a user calls the argument with the name.

    Raises:
        ModelError: there is no such model.
    """
    with loading_bars(console) as bars:
        name = find_model(given, bars, origin)
        if Path(name).is_dir():
            return read_config(name, bars)
    # Downloads draw bars of their own, which would write over ours.
    console.print(f"Asking the hub for {name}", highlight=False, markup=False)
    return read_config(name)


def load(console: Console, found: FoundModel, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """A model that was found, ready to generate.

    Args:
        console: where the bars are drawn.
        found: what `find` returned.
        dtype: of its weights.
        device: where it runs.

    Raises:
        ModelError: it is no causal language model, or its weights cannot be read.
    """
    if not Path(found.name).is_dir():
        return load_weights(found, dtype, device)
    with loading_bars(console) as bars:
        return load_weights(found, dtype, device, bars)
