"""What a node has: the rows of a cache that it alone holds, and the states that several nodes give together."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from kvlayers.core.cache import Cache
from kvlayers.core.cache_layer import LAYER_CLASSES, LayerState
from kvlayers.core.cache_operations import CacheState
from kvlayers.core.dense_store import DenseStore, may_share
from kvlayers.core.token_layer import TokenLayer
from kvlayers.core.token_store import KVPair
from kvlayers.errors import CacheFileError, UnsupportedLayerError
from kvlayers.kernels.codes.smoothing import NAMES as SMOOTHING_NAMES
from kvlayers.persistence.format import DTYPE_NAMES, Description, LayerRecord, ModelRecord, canonical, layer_prefix
from kvlayers.persistence.load import SavedFile, loads_prefixes
from kvlayers.persistence.node_file import (
    CACHE,
    NODE,
    EntryFacts,
    NodeFile,
    NodeRecord,
    RowGroup,
    RowRun,
    Rows,
    TensorForm,
    rows_name,
)
from kvlayers.persistence.save import described, header_of
from kvlayers.persistence.tensor_file import DIGEST_BYTES, TOKEN_IDS, Content, content_of, file_header
from kvlayers.prefix.keys import Tokens
from kvlayers.prefix.nodes import Node
from kvlayers.quantized.packed_blocks import PACKED_NAMES

NODE_TOKENS = 256
"""Nodes are cut where the position of a token is a multiple of this, so that equal tokens fill equal nodes."""

MOST_PIECES = 4
"""Nodes that stand for the tokens of one. More are written as one."""

DENSE_NAMES = ("keys", "values")
CODE_NAMES = tuple(name for name in PACKED_NAMES if name != "block_ends")
SINK_NAMES = ("sink_keys", "sink_values")
"""Tensors with a row for each token, for each packed block of tokens, and for each token before these blocks."""

_WITHOUT_ROWS = {"block_ends", *SMOOTHING_NAMES}

_OF_PACKED_LAYERS = {*DENSE_NAMES, *SINK_NAMES, *PACKED_NAMES, *SMOOTHING_NAMES}


_Reader = Callable[[int, int], Mapping[str, Tensor]]
"""Given the first row and the number of rows, the tensors of a layer with these rows, by name."""

_LayerRows = tuple[tuple[TensorForm, ...], tuple[RowRun, ...], _Reader]
"""The tensors of a layer with rows of the same tokens: their forms, sorted by name; the tokens; what reads the rows."""

_Divided = tuple[LayerState, list[_LayerRows], Mapping[str, object] | None]
"""The state of a layer without rows of tokens, these rows, and what they depend on besides tokens."""


class EntryStates:
    """The states of a cache, divided into rows of tokens and all else.

    Args:
        cache: the cache, to which nobody writes.
        label: model and namespace.
        ids: all tokens that it has seen.
        lengths: lengths that it serves.
    """

    def __init__(self, cache: Cache, label: str, ids: Tokens, lengths: Sequence[int]) -> None:
        self.ids = ids
        divided = [_divided(layer) for layer in cache.adapted_layers()]
        together: dict[tuple[tuple[TensorForm, ...], tuple[RowRun, ...]], list[tuple[int, _Reader]]] = {}
        for index, (_, found, _) in enumerate(divided):
            for forms, runs, read in found:
                together.setdefault((forms, runs), []).append((index, read))
        self.groups = [
            RowGroup(tuple(index for index, _ in members), forms, runs) for (forms, runs), members in together.items()
        ]
        self._readers = [[read for _, read in members] for members in together.values()]
        state = CacheState(cache.kind, tuple(state for state, _, _ in divided))
        description, small = described(cache, state, ModelRecord())
        records = description.cache.layers
        self.cuttable = all(_is_cuttable(*each) for each in zip(records, divided, strict=True))
        self._lengths = () if self.cuttable else tuple(lengths)
        self._facts = EntryFacts(
            label,
            self.cuttable,
            _settings(cache, [(state.kind, settings) for state, _, settings in divided], small),
            tuple(sorted({state.kind for state, _, _ in divided})),
            description.versions,
            tuple(group._replace(runs=()) for group in self.groups),
        )
        self._saved = _saved(description, small, self.cuttable)

    def shared(self, chain: Sequence[Node], tokens: int) -> int:
        """The position up to which a new node needs no rows, because these nodes have them.

        Args:
            chain: nodes, each behind its parent.
            tokens: how many of the first tokens they share.
        """
        last = chain[-1].record.entry if chain else None
        if last is None or not last.groups or (last.cuttable, last.settings) != (self.cuttable, self._facts.settings):
            return 0
        stops = [node.record.start for node in chain[1:]] + [chain[-1].record.stop]
        start = min(tokens, stops[-1]) if self.cuttable else min(tokens, stops[-1], len(self.ids) - 1)
        for group in self.groups:
            held = [
                other.between(node.record.start, stop).positions()
                for node, stop in zip(chain, stops, strict=True)
                for other in node.record.own()
                if other.key == group.key
            ]
            begins, ends = group.positions()
            there = [np.empty(0, np.int64), *(_as_numbers(*rows) for rows in held)]
            is_there = np.isin(_as_numbers(begins, ends), np.concatenate(there)) & (ends <= tokens)
            start = min([start, *begins[~is_there][:1].tolist()])
        return start

    def nodes(self, parent: str, start: int) -> Iterator[Node]:
        """The nodes with all rows from a position on.

        Args:
            parent: name of the node with the rows before; "" if there are none.
            start: the position.
        """
        length = len(self.ids)
        begins = np.concatenate([np.empty(0, np.int64), *(group.positions()[0] for group in self.groups)])
        spans = np.unique(begins[begins >= start] // NODE_TOKENS)
        cuts = [start, *(NODE_TOKENS * spans[1:]).tolist(), length]
        for first, stop in itertools.pairwise(cuts):
            # Not without any block if the first tokens are packed.
            whole = stop == length or (
                self.cuttable and all(group.between(0, stop).runs for group in self.groups if _has_codes(group))
            )
            runs = tuple(group.between(0 if whole else first, stop).runs for group in self.groups)
            record = NodeRecord(self._facts, parent, first, stop, whole, self._lengths if whole else (), runs)
            if record.has_cache:
                record = replace(record, cache=bytes(self._saved[-DIGEST_BYTES:]).hex())
            own = record.own()
            ends = [int(end) for group in own for end in group.positions()[1][-1:]]
            ids = self.ids[first : max([stop, *ends])]
            header = file_header(record.tensors(len(ids), len(self._saved)), {NODE: canonical(record)})
            node = Node(header, record, ids.copy())
            parent = node.name
            yield node

    def content(self, node: Node) -> Content:
        """The content of the file of one of these nodes."""
        tensors = {
            TOKEN_IDS: [torch.from_numpy(node.ids)],
            CACHE: [torch.frombuffer(self._saved, dtype=torch.uint8)],
        }
        for number, (group, held) in enumerate(zip(self.groups, node.record.own(), strict=True)):
            if held.rows:
                first = int(np.searchsorted(group.positions()[0], held.runs[0].first))
                found = [read(first, held.rows) for read in self._readers[number]]
                for form in group.tensors:
                    tensors[rows_name(number, form.name)] = [each[form.name] for each in found]
        return content_of(node.header, tensors)


def _as_numbers(begins: Rows, ends: Rows) -> Rows:
    """A number for each row, the same for rows of the same tokens."""
    return begins * 2**20 + (ends - begins)


def _is_cuttable(record: LayerRecord, divided: _Divided) -> bool:
    """Whether the first tokens of a layer can be used without the others: all that depends on tokens is in rows."""
    layer_class, (state, found, _) = LAYER_CLASSES.get(record.kind), divided
    keeps_all = layer_class is not None and layer_class.traits.keeps_every_token is True
    is_packed = keeps_all and record.facts.get("store") == "QuantizedStore" and set(record.tensors) <= _OF_PACKED_LAYERS
    others = set(state.tensors) - {form.name for forms, _, _ in found for form in forms} - _WITHOUT_ROWS
    is_divided = not any(state.tensors[name].numel() for name in others)
    return bool(found) and is_divided and (is_packed or loads_prefixes(record))


def _saved(description: Description, tensors: dict[str, Tensor], cuttable: bool) -> Content:
    """The saved cache without rows. It is the same for all caches whose first tokens can be used, however many follow.

    Raises:
        StateMismatchError: the cache has more than a file can hold.
    """
    cache = description.cache
    if cuttable:
        tensors = {name: tensor[:1] if name.endswith(".block_ends") else tensor for name, tensor in tensors.items()}
        layers = tuple(replace(layer, facts={**layer.facts, "length": 0}) for layer in cache.layers)
        cache = replace(cache, length=0, layers=layers)
    # The record of the node says what has written it.
    header = header_of(replace(description, cache=cache, versions={}), tensors)
    return content_of(header, {name: [tensor] for name, tensor in tensors.items()})


def span_needed(record: NodeRecord, length: int) -> tuple[int, int]:
    """Where the rows begin that are needed for the first tokens of an entry: from a position on, and before another."""
    firsts = [(group.runs[0].first, _has_codes(group)) for group in record.groups if group.runs]
    codes = [first + 1 for first, has_codes in firsts if has_codes]
    return min([first for first, _ in firsts], default=0), max([length, *codes])


def _has_codes(group: RowGroup) -> bool:
    return any(form.name in CODE_NAMES for form in group.tensors)


def _settings(cache: Cache, layers: Sequence[tuple[str, object]], tensors: Mapping[str, Tensor]) -> str:
    """A text that is equal for caches whose states for the same tokens can stand for one another.

    A lookup serves the first tokens of any entry that has them, so an entry may as well begin with the states of
    another one. It may not if states depend on more than tokens. Codes mean nothing without the vectors that smoothed
    keys.
    """
    digest = hashlib.sha256(canonical([cache.kind, cache.describe(), layers]).encode())
    for name, tensor in sorted(tensors.items()):
        if name.endswith(SMOOTHING_NAMES):
            digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _described(layer: Any) -> Mapping[str, object] | None:
    """What states of a layer depend on besides tokens, `None` if other things count.

    States of layers that evict tokens depend on which tokens came together, and of unknown layers nobody knows.
    """
    try:
        return None if layer.traits.is_upstream or layer.fidelity == "evicting" else layer.describe()
    except UnsupportedLayerError:
        return None


def _divided(layer: Any) -> _Divided:
    """The state of a layer without rows of tokens, these rows, and what they depend on besides tokens."""
    settings = _described(layer)
    if isinstance(layer, TokenLayer) and layer.traits.keeps_every_token and may_share(layer.store):
        return *_of_dense(layer, layer.store), settings
    state = layer.state()
    found = [] if settings is None else list(_rows_of(state))
    names = {form.name for forms, _, _ in found for form in forms}
    small = {name: tensor[:, :, :0] if name in names else tensor for name, tensor in state.tensors.items()}
    return LayerState(state.kind, small, state.facts), found, settings


def _of_dense(layer: TokenLayer, store: DenseStore) -> tuple[LayerState, list[_LayerRows]]:
    """State and rows of a layer in full precision, without copies of rows that nobody reads."""
    length = store.length
    twin = layer.fork()
    twin.store.truncate(0)
    state = twin.state()

    def read(first: int, rows: int) -> Mapping[str, Tensor]:
        part = store.fork()
        part.truncate(first + rows)
        pieces = part.pieces(rows)
        return {
            "keys": torch.cat([piece.keys for piece in pieces], 2),
            "values": torch.cat([piece.values for piece in pieces], 2),
        }

    forms = _forms({name: state.tensors[name] for name in DENSE_NAMES if name in state.tensors})
    whole = LayerState(state.kind, state.tensors, {**state.facts, "length": length})
    return whole, [(forms, (RowRun(0, 1, length),), read)] if length and forms else []


def _rows_of(state: LayerState) -> Iterator[_LayerRows]:
    """The rows of tokens in a state. Its newest tokens are in `keys` and `values`, the ones before may be packed."""
    length, tensors = state.facts.get("length"), state.tensors
    dense = {name: tensors[name] for name in DENSE_NAMES if name in tensors}
    if type(length) is not int or len({states.shape[2:3] for states in dense.values()}) != 1:
        return
    newest = next(iter(dense.values())).shape[2]
    packed = {name: tensors[name] for name in CODE_NAMES if name in tensors}
    # Other packages may count something else in this dimension.
    if newest > length:
        return
    if newest and (forms := _forms(dense)):
        yield forms, (RowRun(length - newest, 1, newest),), _reader(dense)
    ends = tensors.get("block_ends")
    if packed and ends is not None and (forms := _forms(packed)):
        held = [int(end) for end in ends[1:]]
        first = length - newest - sum(held)
        yield forms, _runs(first, held), _reader(packed)
        sinks = {name: tensors[name] for name in SINK_NAMES if name in tensors}
        forms = _forms(sinks)
        if first and forms and all(states.shape[2] == first for states in sinks.values()):
            yield forms, (RowRun(0, 1, first),), _reader(sinks)


def _reader(tensors: Mapping[str, Tensor]) -> _Reader:
    return lambda first, rows: {name: states[:, :, first : first + rows] for name, states in tensors.items()}


def _forms(tensors: Mapping[str, Tensor]) -> tuple[TensorForm, ...]:
    """The forms of tensors `[batch, kv_heads, rows, width]`; none if rows of them cannot be held apart."""
    are_apart = all(
        states.dim() == 4 and 0 not in (*states.shape[:2], states.shape[3]) and states.layout == torch.strided
        for states in tensors.values()
    )
    if not are_apart or not {states.dtype for states in tensors.values()} <= DTYPE_NAMES.keys():
        return ()
    return tuple(
        TensorForm(name, states.dtype, states.shape[0], states.shape[1], states.shape[3])
        for name, states in sorted(tensors.items())
    )


def _runs(first: int, tokens: Sequence[int]) -> tuple[RowRun, ...]:
    runs: list[RowRun] = []
    for each, equal in itertools.groupby(tokens):
        runs.append(RowRun(first, each, len(list(equal))))
        first += each * runs[-1].rows
    return tuple(runs)


class NodesFile(SavedFile):
    """A saved cache whose rows are in several nodes.

    Args:
        chain: the files of the nodes, each behind its parent. The first or the last one has the cache without rows.
        length: rows that begin here or later are not used.

    Raises:
        CacheFileError: the nodes do not have all rows that the last one describes.
    """

    def __init__(self, chain: Sequence[NodeFile], length: int) -> None:
        records = [node.record for node in chain]
        end, path = records[-1], chain[-1].path
        super().__init__(chain[0 if end.entry.cuttable else -1].cache())
        self.nbytes = sum(node.head.header.file_bytes for node in chain)
        self._pieces: dict[str, list[Tensor]] = {}
        lengths: Counter[int] = Counter()
        for group in end.groups:
            names = [layer_prefix(0, layer) + form.name for layer in group.layers for form in group.tensors]
            if not self.header.tensors.keys() >= set(names):
                raise CacheFileError(f"{path} is damaged: it has rows of tensors that its cache lacks.")
            begins, ends = group.positions()
            # Packed tokens need all tokens before them, and a block of codes. A layer is cropped after it was loaded.
            least = len(begins) if group.tensors[0].name in SINK_NAMES else int(_has_codes(group))
            needed = max(int(np.searchsorted(begins, length)), least)
            begins, ends = begins[:needed], ends[:needed]
            if not len(begins):
                continue
            missing, begin = len(begins), int(begins[0])
            stops = [record.start for record in records[1:]] + [max(length, int(begins[-1]) + 1)]
            for node, stop in zip(chain, stops, strict=True):
                for number, own in enumerate(node.record.own()):
                    used = own.between(begin, stop)
                    if (node.record.entry.settings, own.key) == (end.entry.settings, group.key) and used.rows:
                        missing -= used.rows
                        self._add(node, number, own, used)
            if missing:
                raise CacheFileError(f"{path} is damaged: {missing} rows are in none of its nodes.")
            tokens = ends - begins
            for layer in group.layers if end.entry.cuttable else ():
                lengths[layer] += int(tokens.sum())
                if _has_codes(group):
                    name = layer_prefix(0, layer) + "block_ends"
                    self._pieces[name] = [super().tensor(name), torch.from_numpy(tokens)]
        if end.entry.cuttable:
            cache = self.description.cache
            layers = [
                replace(layer, facts={**layer.facts, "length": lengths[n]}) for n, layer in enumerate(cache.layers)
            ]
            cache = replace(cache, length=max(lengths.values(), default=0), layers=tuple(layers))
            self.description = replace(self.description, cache=cache)

    def _add(self, node: NodeFile, number: int, group: RowGroup, used: RowGroup) -> None:
        first = int(np.searchsorted(group.positions()[0], used.runs[0].first))
        for form in group.tensors:
            states = node.tensors[rows_name(number, form.name)][:, :, :, first : first + used.rows]
            for place, layer in enumerate(group.layers):
                self._pieces.setdefault(layer_prefix(0, layer) + form.name, []).append(states[place])

    @override
    def pieces(self, prefix: str) -> list[KVPair]:
        keys, values = (self._pieces.get(prefix + name, []) for name in DENSE_NAMES)
        return list(zip(keys, values, strict=True))

    @override
    def tensor(self, name: str, tokens: int | None = None, verify: bool = True) -> Tensor:
        # The digest of a node, which was compared, is also one of the saved cache in it. Rows were left out before.
        rows = self._pieces.get(name)
        return super().tensor(name, verify=False) if rows is None else torch.cat(rows, min(rows[0].dim() - 1, 2))
