"""What a node has: the rows of a cache that it alone holds, and the states that several nodes give together."""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from kvlayers.caches.base import Cache
from kvlayers.caches.operations import CacheState
from kvlayers.errors import CacheFileError, StateMismatchError, UnsupportedLayerError
from kvlayers.layers import LayerState, TokenLayer
from kvlayers.layers.operations import LAYER_CLASSES
from kvlayers.persistence.format import TOKEN_IDS, LayerRecord, ModelRecord, canonical
from kvlayers.persistence.node_record import NodeRecord, RowGroup, RowRun, Rows, TensorForm, rows_name
from kvlayers.persistence.rebuild import loads_prefixes
from kvlayers.persistence.safetensors_header import DTYPES, parse_header
from kvlayers.persistence.save import described, with_checksums
from kvlayers.persistence.saved_file import SavedFile
from kvlayers.prefix.keys import Tokens
from kvlayers.prefix.nodes import Node, name_of
from kvlayers.quantizers.smoothing import NAMES as SMOOTHING_NAMES
from kvlayers.stores import DenseStore
from kvlayers.stores.contract import KVPair
from kvlayers.stores.packed_blocks import PACKED_NAMES

NODE_TOKENS = 256
"""Nodes are cut where the position of a token is a multiple of this, so that equal tokens fill equal nodes."""

MOST_PIECES = 4
"""Nodes that stand for the tokens of one. More are written as one."""

DENSE_NAMES = ("keys", "values")
CODE_NAMES = tuple(name for name in PACKED_NAMES if name != "block_ends")
SINK_NAMES = ("sink_keys", "sink_values")
"""Tensors with a row for each token, for each packed block of tokens, and for each token before these blocks."""

_OF_PACKED_LAYERS = {*DENSE_NAMES, *SINK_NAMES, *PACKED_NAMES, *SMOOTHING_NAMES}


@dataclass(frozen=True)
class _LayerRows:
    """The tensors of a layer with rows of the same tokens.

    Attributes:
        forms: their forms, sorted by name.
        runs: the tokens of the rows.
        read: given the first row and the number of rows, the tensors by name.
    """

    forms: tuple[TensorForm, ...]
    runs: tuple[RowRun, ...]
    read: Callable[[int, int], Mapping[str, Tensor]]


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
        self._cache, self._label = cache, label
        layers = list(cache.adapted_layers())
        divided = [_divided(layer) for layer in layers]
        self._state = CacheState(cache.kind, tuple(state for state, _, _ in divided))
        together: dict[tuple[object, ...], list[tuple[int, _LayerRows]]] = {}
        for index, (_, found, settings) in enumerate(divided):
            for rows in found:
                together.setdefault((rows.forms, settings, rows.runs), []).append((index, rows))
        self.groups = [
            RowGroup(tuple(index for index, _ in members), rows.forms, str(key[1]), rows.runs)
            for key, members in together.items()
            for rows in [members[0][1]]
        ]
        self._sources = [[rows for _, rows in members] for members in together.values()]
        self._description, self._small = described(cache, self._state, ModelRecord(), None)
        records = self._description.cache.layers
        self.cuttable = all(loads_prefixes(record) or _is_packed(record) for record in records)
        self._needs_config = not all(record.kind in LAYER_CLASSES for record in records)
        self._lengths = () if self.cuttable else tuple(lengths)

    def shared(self, chain: Sequence[Node], tokens: int) -> int:
        """The position up to which a new node needs no rows, because these nodes have them.

        Args:
            chain: nodes, each behind its parent.
            tokens: how many of the first tokens they share.
        """
        if not chain or not chain[-1].record.groups or chain[-1].record.cuttable != self.cuttable:
            return 0
        start = min(tokens, chain[-1].end) if self.cuttable else min(tokens, chain[-1].end, len(self.ids) - 1)
        stops = [node.start for node in chain[1:]] + [chain[-1].record.stop]
        for group in self.groups:
            held = [
                other.between(node.start, stop).positions()
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
            whole = stop == length or (self.cuttable and all(_can_end(group, stop) for group in self.groups))
            groups = tuple(group.between(0 if whole else first, stop) for group in self.groups)
            record = NodeRecord(parent, first, stop, self.cuttable, whole, groups)
            ends = [int(end) for group in record.own() for end in group.positions()[1][-1:]]
            ids = self.ids[first : max([stop, *ends])].copy()
            lengths = frozenset(self._lengths if whole else ())
            name = name_of(self._label, record, ids, lengths, self._description.versions)
            yield Node(name, 0, self._label, ids, record, lengths, self._needs_config)
            parent = name

    def content(self, node: Node) -> bytes:
        """The content of the file of one of these nodes.

        Raises:
            StateMismatchError: the cache has more than a file can hold.
        """
        record, layers = node.record, list[LayerRecord]()
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self._description.cache.layers):
            own = [group for group in self.groups if index in group.layers]
            in_rows = {form.name for group in own for form in group.tensors}
            prefix = f"layers.{index}."
            if record.whole:
                small = {name: self._small[prefix + name] for name in layer.tensors if name not in in_rows}
                facts, small = _cut(layer.facts, small, own, record.stop)
                tensors |= {prefix + name: tensor for name, tensor in small.items()}
                layers.append(replace(layer, facts=facts))
            else:
                layers.append(LayerRecord(layer.kind, {}, tuple(sorted(in_rows))))
        tensors |= {name: tensor for name, tensor in self._small.items() if name.startswith("rotary.")}
        tensors[TOKEN_IDS] = torch.from_numpy(node.ids)[None]
        for number, (group, held) in enumerate(zip(self.groups, record.own(), strict=True)):
            rows = sum(run.rows for run in held.runs)
            if rows:
                first = int(np.searchsorted(group.positions()[0], held.runs[0].first))
                found = [source.read(first, rows) for source in self._sources[number]]
                for form in group.tensors:
                    tensors[rows_name(number, form.name)] = torch.stack([each[form.name] for each in found])
        # Equal for all that write this node, however many tokens follow.
        cache = replace(self._description.cache, length=node.end, layers=tuple(layers))
        weights_id = f"{self._label} {','.join(map(str, sorted(node.lengths)))}"
        description = replace(self._description, cache=cache, model=ModelRecord(weights_id=weights_id))
        tensors, metadata = with_checksums(description, tensors, record)
        content = save(tensors, metadata)
        try:
            parse_header(node.name, len(content), lambda start, end: content[start:end])
        except CacheFileError as error:
            raise StateMismatchError(f"The cache has more than a file can hold: {error}") from error
        return content


def _as_numbers(begins: Rows, ends: Rows) -> Rows:
    """A number for each row, the same for rows of the same tokens."""
    return begins * 2**20 + (ends - begins)


def _is_packed(record: LayerRecord) -> bool:
    layer_class = LAYER_CLASSES.get(record.kind)
    keeps_all = layer_class is not None and layer_class.keeps_every_token is True
    return keeps_all and record.facts.get("store") == "QuantizedStore" and set(record.tensors) <= _OF_PACKED_LAYERS


def _cut(
    facts: Mapping[str, Any], small: Mapping[str, Tensor], groups: Sequence[RowGroup], stop: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and other tensors of a layer whose rows from `stop` on are left out."""
    cut, kept = dict(facts), dict(small)
    for group in groups:
        begins, ends = group.positions()
        needed = needed_rows(group, stop)
        if needed < len(begins):
            cut["length"] = cut["length"] - int((ends - begins)[needed:].sum())
        if _has_codes(group):
            kept["block_ends"] = small["block_ends"][: 1 + needed]
    return cut, kept


def needed_rows(group: RowGroup, length: int) -> int:
    """How many of the first rows of a group are needed for so many tokens."""
    begins, _ = group.positions()
    # A layer with packed tokens needs all tokens before them, and a block of codes. It is cropped after it was loaded.
    least = len(begins) if group.tensors[0].name in SINK_NAMES else int(_has_codes(group))
    return max(int(np.searchsorted(begins, length)), least)


def span_needed(record: NodeRecord, length: int) -> tuple[int, int]:
    """Where the rows begin that are needed for the first tokens of an entry: from a position on, and before another."""
    firsts = [(group.runs[0].first, _has_codes(group)) for group in record.groups if group.runs]
    codes = [first + 1 for first, has_codes in firsts if has_codes]
    return min([first for first, _ in firsts], default=0), max([length, *codes])


def _can_end(group: RowGroup, stop: int) -> bool:
    """Whether a layer can be made of the rows before `stop`: not without any block if its first tokens are packed."""
    return not _has_codes(group) or bool(group.between(0, stop).runs)


def _has_codes(group: RowGroup) -> bool:
    return any(form.name in CODE_NAMES for form in group.tensors)


def _settings(layer: Any, state: LayerState) -> str:
    """A text that is equal for layers whose states for the same tokens can stand for one another; "" for no others.

    A lookup serves the first tokens of any entry that has them, so an entry may as well begin with the states of
    another one. It may not if states depend on more than tokens: those of layers that evict tokens depend on which
    tokens came together, and of unknown layers nobody knows. Codes mean nothing without the vectors that smoothed keys.
    """
    try:
        if layer.is_upstream or layer.fidelity == "evicting":
            return ""
        digest = hashlib.sha256(canonical([layer.kind, layer.describe()]).encode())
    except UnsupportedLayerError:
        return ""
    for name in SMOOTHING_NAMES:
        if name in state.tensors:
            digest.update(state.tensors[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _divided(layer: Any) -> tuple[LayerState, list[_LayerRows], str]:
    """The state of a layer without rows of tokens, these rows, and what they depend on besides tokens."""
    if isinstance(layer, TokenLayer) and layer.keeps_every_token and isinstance(layer.store, DenseStore):
        state, found = _of_dense(layer, layer.store)
        return state, found, _settings(layer, state)
    state = layer.state()
    settings = _settings(layer, state)
    found = list(_rows_of(state)) if settings else []
    names = {form.name for rows in found for form in rows.forms}
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
        part.drop_oldest(first)
        return part.state()

    forms = _forms({name: state.tensors[name] for name in DENSE_NAMES if name in state.tensors})
    whole = LayerState(state.kind, state.tensors, {**state.facts, "length": length})
    return whole, [_LayerRows(forms, (RowRun(0, 1, length),), read)] if length and forms else []


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
        yield _LayerRows(forms, (RowRun(length - newest, 1, newest),), _reader(dense))
    ends = tensors.get("block_ends")
    if packed and ends is not None and (forms := _forms(packed)):
        held = [int(end) for end in ends[1:]]
        first = length - newest - sum(held)
        yield _LayerRows(forms, _runs(first, held), _reader(packed))
        sinks = {name: tensors[name] for name in SINK_NAMES if name in tensors}
        forms = _forms(sinks)
        if first and forms and all(states.shape[2] == first for states in sinks.values()):
            yield _LayerRows(forms, (RowRun(0, 1, first),), _reader(sinks))


def _reader(tensors: Mapping[str, Tensor]) -> Callable[[int, int], Mapping[str, Tensor]]:
    return lambda first, rows: {name: states[:, :, first : first + rows] for name, states in tensors.items()}


def _forms(tensors: Mapping[str, Tensor]) -> tuple[TensorForm, ...]:
    """The forms of tensors `[batch, kv_heads, rows, width]`; none if rows of them cannot be held apart."""
    forms = []
    for name, states in sorted(tensors.items()):
        if states.dim() != 4 or states.layout != torch.strided or states.dtype not in DTYPES.values():
            return ()
        batch, kv_heads, _, width = states.shape
        if not batch * kv_heads * width:
            return ()
        forms.append(TensorForm(name, states.dtype, batch, kv_heads, width))
    return tuple(forms)


def _runs(first: int, tokens: Sequence[int]) -> tuple[RowRun, ...]:
    runs: list[RowRun] = []
    for each in tokens:
        if runs and runs[-1].tokens == each:
            runs[-1] = runs[-1]._replace(rows=runs[-1].rows + 1)
        else:
            runs.append(RowRun(first, each, 1))
        first += each
    return tuple(runs)


class ChainStates:
    """The states that several nodes give together.

    Args:
        chain: the files of the nodes, each behind its parent. The last one says what the cache is.
        length: rows that begin here or later are not used.

    Raises:
        CacheFileError: the nodes do not have all rows that the last one describes.
    """

    def __init__(self, chain: Sequence[SavedFile], length: int) -> None:
        self._length = length
        records = [saved.node for saved in chain if saved.node is not None]
        self._pieces: dict[tuple[int, str], list[Tensor]] = {}
        self._groups: dict[int, list[RowGroup]] = {}
        for group in records[-1].groups:
            for layer in group.layers:
                self._groups.setdefault(layer, []).append(group)
                self._pieces.update({(layer, form.name): [] for form in group.tensors})
            begins = group.positions()[0][: needed_rows(group, length)]
            if not len(begins):
                continue
            missing, begin = len(begins), int(begins[0])
            stops = [record.start for record in records[1:]] + [max(length, int(begins[-1]) + 1)]
            for saved, record, stop in zip(chain, records, stops, strict=True):
                for number, own in enumerate(record.own()):
                    used = own.between(begin, stop)
                    rows = sum(run.rows for run in used.runs)
                    if own.key == group.key and rows:
                        first = int(np.searchsorted(own.positions()[0], used.runs[0].first))
                        missing -= rows
                        self._add(saved, number, own, first, rows)
            if missing:
                raise CacheFileError(f"{chain[-1].path} is damaged: {missing} rows are in none of its nodes.")

    def _add(self, saved: SavedFile, number: int, group: RowGroup, first: int, rows: int) -> None:
        for form in group.tensors:
            states = saved.tensor(rows_name(number, form.name), verify=False)[:, :, :, first : first + rows]
            for place, layer in enumerate(group.layers):
                self._pieces[layer, form.name].append(states[place])

    def pairs(self, index: int) -> list[KVPair]:
        """Keys and values of the needed tokens of a layer, piece by piece, as views of the files."""
        return list(zip(self._pieces.get((index, "keys"), []), self._pieces.get((index, "values"), []), strict=True))

    def state(
        self, index: int, record: LayerRecord, small: Callable[[str], Tensor]
    ) -> tuple[dict[str, Tensor], Mapping[str, object]]:
        """The tensors and the facts of a layer with the needed tokens.

        Args:
            index: the layer.
            record: what the file says about it.
            small: the tensors that are not divided into rows, by name.
        """
        groups = self._groups.get(index, [])
        forms = {form.name: form for group in groups for form in group.tensors}
        others = {name: small(name).clone() for name in record.tensors if name not in forms}
        facts, tensors = _cut(record.facts, others, groups, self._length)
        for name, form in forms.items():
            rows = self._pieces[index, name]
            empty = (form.batch, form.kv_heads, 0, form.width)
            tensors[name] = torch.cat(rows, 2) if rows else torch.empty(empty, dtype=form.dtype)
        return tensors, facts
