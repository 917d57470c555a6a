"""Damaged files of a prefix store: whatever bytes change, what is found is right, or named as damaged."""

import pathlib
import tempfile
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlayers
from damage import damaged
from kvlayers.errors import KVLayersError
from kvlayers.prefix.backends.local import LocalBackend
from kvlayers.prefix.directory import Directory
from kvlayers.prefix.keys import label_of
from prefix_caches import KINDS, Kind, check, extend

IDS = list(range(3, 303))
"""More than one node."""


@dataclass(frozen=True)
class Written:
    kind: Kind
    files: dict[str, bytes]
    path: str
    ids: np.ndarray


def _snapshot() -> kvlayers.DynamicCache:
    return kvlayers.DynamicCache([(None, None, torch.tensor(100))])


@pytest.fixture(scope="module")
def written() -> dict[str, Written]:
    """A prefix of several nodes, one of packed tokens, and states that stand alone."""
    kinds = {"full": KINDS["full"], "quantized": KINDS["quantized"], "snapshot": Kind(_snapshot)}
    found = {}
    for name, kind in kinds.items():
        with tempfile.TemporaryDirectory() as directory:
            cache = kind.make()
            extend(kind, cache, [], IDS)
            ids = np.array(IDS, np.int64)
            path, _ = Directory(LocalBackend(directory)).write(label_of(None, "m", ""), ids, {len(IDS)}, cache, ())
            files = {file.name: file.read_bytes() for file in sorted(pathlib.Path(directory).iterdir())}
            found[name] = Written(kind, files, pathlib.Path(path).name, ids)
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_of_nodes_is_named_or_does_not_matter(data: st.DataObject, written: dict[str, Written]) -> None:
    it = written[data.draw(st.sampled_from(sorted(written)))]
    name = data.draw(st.sampled_from(sorted(it.files)))
    content = damaged(data, it.files[name])
    is_known = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as place_of_files:
        for each, whole in it.files.items():
            (pathlib.Path(place_of_files) / each).write_bytes(whole)
        directory = Directory(LocalBackend(place_of_files))
        if is_known:
            directory.changes(())
        path = pathlib.Path(place_of_files) / name
        path.unlink()
        path.write_bytes(content)
        for entry in directory.changes(()).added:
            try:
                cache = directory.load(str(entry.path), len(it.ids), None, None)
            except KVLayersError:
                assert content != it.files[name]
                continue
            assert cache is not None
            length = cache.get_seq_length()
            assert length == len(it.ids) or content != it.files[name]
            check(it.kind, cache, IDS[:length])
