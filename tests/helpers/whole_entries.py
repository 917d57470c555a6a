"""Entries as kvlayers wrote them before it had blocks: one file with a whole cache."""

import hashlib
import pathlib
import tempfile

import numpy as np
import torch

import kvlayers
from kvlayers.prefix.keys import label_of


def whole_entry(
    ids: list[int], cache: kvlayers.Cache, config: object | None = None, model: str | None = "m", namespace: str = ""
) -> tuple[str, bytes]:
    """Name and content of the file of an entry."""
    label = label_of(config, model, namespace)
    name = hashlib.sha256(label.encode() + np.array(ids, np.int64).tobytes()).hexdigest() + ".safetensors"
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / name
        kvlayers.save_cache(cache, path, token_ids=torch.tensor([ids]), weights_id=f"{label} {len(ids)}")
        return name, path.read_bytes()
