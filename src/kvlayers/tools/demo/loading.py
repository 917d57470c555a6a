"""Loads a model for a command, with progress bars."""

from pathlib import Path

import torch
from rich.console import Console

from kvlayers.tools.demo.model import FoundModel, LoadedModel, find_model, load_weights, read_config
from kvlayers.tools.demo.report import loading_bars


def find(console: Console, name: str | None, option: str = "--model") -> FoundModel:
    """Read the config and the tokenizer of a model, so that other arguments can be checked before weights are loaded.

    Args:
        console: where the bars are drawn.
        name: directory or hub name, `None` for the demo's model.
        option: the option that names the model.

    Raises:
        ModelError: there is no such model.
    """
    with loading_bars(console) as bars:
        source = find_model(name, bars, option)
        if Path(source).is_dir():
            return read_config(source, bars)
    # Downloads draw their own bars, which would overwrite these.
    console.print(f"Asking the hub for {source}", highlight=False, markup=False)
    return read_config(source)


def load(console: Console, found: FoundModel, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Load the weights of a model that was found.

    Args:
        console: where the bars are drawn.
        found: what `find` returned.
        dtype: dtype of the weights.
        device: device of the model.

    Raises:
        ModelError: the model is not a causal language model, or its weights cannot be read.
    """
    if not Path(found.name).is_dir():
        return load_weights(found, dtype, device)
    with loading_bars(console) as bars:
        return load_weights(found, dtype, device, bars)
