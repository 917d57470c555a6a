"""Tokens in packed blocks: quantized once, read in place, dropped and cropped token by token."""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from kvlayers.core.buffer import StateForm, nbytes_of
from kvlayers.core.dense_store import DenseStore, without_spare_room
from kvlayers.core.token_store import BufferSwap, KVPair
from kvlayers.errors import StateMismatchError
from kvlayers.kernels.attention.segment_kinds import DenseSegment, PackedSegment
from kvlayers.kernels.codes import cpu_packing as cpu_pack
from kvlayers.kernels.codes import cuda_packing as cuda_launch
from kvlayers.kernels.codes.cuda_packing import pack_obstacle
from kvlayers.kernels.codes.groups import BlockLayout
from kvlayers.kernels.codes.packed_side import PackedSide, pack_side
from kvlayers.kernels.codes.quantizer_contract import CodeFormat, Quantizer, Side, check_groups
from kvlayers.kernels.codes.smoothing import UNSMOOTHED, KeySmoothing, vectors_for
from kvlayers.quantized.smoothing_runs import SmoothingRuns
from kvlayers.utils.transforms import without_autocast

GROWTH_DIVISOR = 128
"""Full blocks grow by their number divided by this: moving them is cheap beside reading all at every token."""

MINIMUM_GROWTH = 0
"""Fewest blocks by which they grow: moving a few blocks is cheap, and a spare block is not."""

TORCH_BLOCKS_AT_ONCE = 16
"""Blocks that torch quantizes together on a CPU, which bounds the temporary memory of a long prefill."""

KERNEL_BLOCKS_AT_ONCE = 256
"""Blocks that are quantized together otherwise: kernels need no temporary memory, but calls and launches take time."""

SIDES: tuple[Side, Side] = ("keys", "values")


class PackedBlocks:
    """Packed keys and values, each in a `DenseStore` whose tokens are blocks: codes for keys, parameters for values.

    Args:
        quantizers: the quantizers of keys and of values.
        forms: the forms of keys and of values.
        block_tokens: tokens of a block.
        hint: the most blocks that are expected, if known.

    Attributes:
        stores: what holds the codes and parameters of keys, and of values.
    """

    def __init__(
        self,
        quantizers: dict[Side, Quantizer],
        forms: tuple[StateForm, StateForm],
        block_tokens: int,
        hint: int | None = None,
    ) -> None:
        self._quantizers = quantizers
        self._layouts = {
            side: BlockLayout(quantizers[side].format, side, form.head_dim, block_tokens)
            for side, form in zip(SIDES, forms, strict=True)
        }
        self.device = forms[0].device
        self.block_tokens = block_tokens
        self.stores = [DenseStore(hint, GROWTH_DIVISOR, MINIMUM_GROWTH) for _ in SIDES]
        self._sides_differ = False
        """Whether keys and values may consist of different segments: there may have been memory for one side alone, and
        two threads that wrote at the same time may have got the slots of one side each."""
        self.promote(*forms)
        self._count([])

    def _count(self, ends: list[int], first: int = 0) -> None:
        """Hold tokens of the blocks that the stores hold.

        Args:
            ends: for each block the number of its tokens that are held, from its beginning: all unless it was cropped.
            first: tokens of the first block that have been dropped.
        """
        self._ends, self._first = ends, first
        # Plain, as each token asks for it.
        self.tokens = sum(ends) - first

    def __len__(self) -> int:
        return len(self._ends)

    def promote(self, key_form: StateForm, value_form: StateForm) -> None:
        """Give back states in the dtype of these forms, in which the parameters are held without rounding."""
        for side, form, store in zip(SIDES, (key_form, value_form), self.stores, strict=True):
            store.promote(*packed_forms(self._layouts[side], form))
        self.dtype = key_form.dtype

    @property
    def blocks_at_once(self) -> int:
        """Blocks to quantize together."""
        torch_quantizes = self.device.type == "cpu" and any(
            quantizer.kernel_search is None or not cpu_pack.takes(self._layouts[side])
            for side, quantizer in self._quantizers.items()
        )
        return TORCH_BLOCKS_AT_ONCE if torch_quantizes else KERNEL_BLOCKS_AT_ONCE

    def prepare(self, blocks: int) -> None:
        """Make room for more blocks, in new memory if necessary, so that returned states never move."""
        self._make_alike()
        self._sides_differ = True
        for store in self.stores:
            store.prepare_slots(blocks)

    def _make_alike(self) -> None:
        """Have keys and values consist of the same segments, since each `PackedSegment` has both."""
        if self._sides_differ:
            for store in self.stores:
                store.compact()
            self._sides_differ = False

    @torch.no_grad()
    def smoothing_for(self, keys: Tensor, last: KeySmoothing | None = None) -> KeySmoothing:
        """How keys are to be smoothed before they are written, after blocks that were so as `last`.

        Args:
            keys: of blocks, `[batch, kv_heads, blocks, tokens, head_dim]`.
            last: how keys before them were, `None` if they are the first.
        """
        find = KeySmoothing.for_keys if last is None else last.for_more_keys
        return find(keys, self._quantizers["keys"])

    @torch.no_grad()
    def write(self, skipped: int, keys: Tensor, values: Tensor, smoothing: KeySmoothing = UNSMOOTHED) -> None:
        """Quantize states into the room that was made, after `skipped` blocks of it. Nobody reads them until `hold`.

        Args:
            skipped: blocks that were written already.
            keys: `[batch, kv_heads, tokens, head_dim]`, a whole number of blocks.
            values: likewise, of the same tokens.
            smoothing: how the keys are smoothed first, the same for all blocks; by default they are packed as they are.
        """
        if keys.is_meta and self.obstacle("keys") is not None:
            # A plan asks for bytes, and the room was made. A test may count what a kernel would launch.
            return
        # Asked once for both sides, and only if no kernel packs them.
        finite = functools.cache(lambda: _finite_tokens(keys, values))
        for side, store, states, partner in zip(SIDES, self.stores, (keys, values), (values, keys), strict=True):
            codes, parameters = store.slots_ahead(skipped, keys.shape[2] // self.block_tokens)
            search, layout = self._quantizers[side].kernel_search, self._layouts[side]
            of_side = smoothing if side == "keys" else UNSMOOTHED
            is_here = codes.device == states.device
            if search is not None and is_here and self.obstacle(side) is None:
                cuda_launch.pack_blocks(states, partner, codes, parameters, layout, search, of_side)
            elif search is not None and is_here and of_side.mean is None and cpu_pack.packs(layout, states, partner):
                cpu_pack.pack_blocks(states, partner, codes, parameters, layout, search, of_side.factor)
            else:
                packed = self._quantized(side, of_side.applied(states), finite())
                for target, found in zip((codes, parameters), packed, strict=True):
                    target.copy_(found)

    def hold(self, blocks: int) -> None:
        """Hold blocks that were written."""
        for store in self.stores:
            store.hold(blocks)
        self._count(self._ends + [self.block_tokens] * blocks, self._first)
        lengths, of_values = ([piece.tokens for piece in store.pieces(len(self))] for store in self.stores)
        self._sides_differ = lengths != of_values

    def obstacle(self, side: Side) -> str | None:
        """Why no kernel packs one side, `None` if one does."""
        search = self._quantizers[side].kernel_search
        if search is None:
            return "there is no kernel for this backend"
        partner = self._layouts["values" if side == "keys" else "keys"]
        vectors = vectors_for(self._quantizers[side]) if side == "keys" else (False, False)
        return pack_obstacle(self._layouts[side], partner.head_dim, self.dtype, self.device, search, *vectors)

    def packing_paths(self) -> Iterator[str]:
        """How each side is packed, in words; nothing on a CPU that has no such choice."""
        for side in SIDES:
            obstacle = self.obstacle(side)
            if obstacle is None:
                yield f"{side} by a Triton kernel"
            elif self.device.type != "cpu":
                yield f"{side} in plain torch, as {obstacle}"

    def _quantized(self, side: Side, states: Tensor, finite: Tensor | None) -> KVPair:
        """Codes and parameters of states of whole blocks: smoothed keys, or the values."""
        quantizer = self._quantizers[side]
        with without_autocast(states.device):
            groups = quantizer.quantize(states if finite is None else torch.where(finite, states, 0))
        check_groups(groups, quantizer.format, states)
        codes, parameters = pack_side(groups, self._layouts[side])
        return codes, parameters if finite is None or side == "keys" else self._marked(parameters, finite)

    def _marked(self, parameters: Tensor, finite: Tensor) -> Tensor:
        """Parameters of values, set to NaN for tokens that are not finite."""
        code_format = self._quantizers["values"].format
        group_tokens = code_format.group_tokens
        # The values of a group along tokens share a scale, so they are marked together.
        groups = torch.unflatten(finite, 2, (-1, self.block_tokens // group_tokens, group_tokens)).all(4).flatten(3)
        whole = torch.unflatten(parameters, 3, (code_format.parameters, groups.shape[3], -1))
        return torch.where(groups[:, :, :, None, :, None], whole, torch.nan).flatten(3)

    def segments(self, skipped: int = 0, runs: SmoothingRuns | None = None) -> Iterator[PackedSegment]:
        """The held tokens without the oldest `skipped` ones, as attention reads them.

        Args:
            skipped: how many are left out.
            runs: how the keys were smoothed, `None` if they were not.
        """
        first, block = self._first + skipped, 0
        while block < len(self._ends) and first >= self._ends[block]:
            first -= self._ends[block]
            block += 1
        ends = self._ends[block:]
        runs = runs or SmoothingRuns()
        if not ends:
            return
        self._make_alike()
        for keys, values in zip(*(store.pieces(len(ends)) for store in self.stores), strict=True):
            for start, stop, smoothing in runs.within(block, block + keys.tokens):
                some = slice(start - block, stop - block)
                held = ends[some]
                all_full = set(held) == {self.block_tokens}
                sides = self._side("keys", keys, some), self._side("values", values, some)
                yield PackedSegment(*sides, first, None if all_full else tuple(held), keys.rows, smoothing)
                first = 0
            ends, block = ends[keys.tokens :], block + keys.tokens

    def _side(self, side: Side, piece: DenseSegment, some: slice) -> PackedSide:
        return PackedSide(piece.keys[:, :, some], piece.values[:, :, some], self._layouts[side])

    def drop_oldest(self, tokens: int) -> None:
        """Forget the oldest tokens. A block is dropped with the last of its tokens."""
        first, gone = self._first + tokens, 0
        while gone < len(self._ends) and first >= self._ends[gone]:
            first -= self._ends[gone]
            gone += 1
        self._count(self._ends[gone:], first)
        for store in self.stores if gone else ():
            store.drop_oldest(gone)

    def truncate(self, tokens: int) -> None:
        """Forget all but the oldest tokens. A cropped block keeps its codes, and records how many tokens are held."""
        kept, remaining = 0, tokens + self._first
        while tokens and kept < len(self._ends) and remaining > 0:
            self._ends[kept] = min(self._ends[kept], remaining)
            remaining -= self._ends[kept]
            kept += 1
        for store in self.stores:
            store.truncate(kept)
        self._count(self._ends[:kept], self._first if kept else 0)

    def selected(self, indices: Tensor) -> Self:
        """Blocks of the selected sequences: row `i` is row `indices[i]` of these."""
        return self._twin([store.selected(indices) for store in self.stores])

    @property
    def is_shared(self) -> bool:
        """Whether others hold the same memory."""
        return any(store.is_shared for store in self.stores)

    def with_codes(self, key_codes: Tensor, key_parameters: Tensor, codes: Tensor, parameters: Tensor) -> Self:
        """Full blocks of these quantizers that were packed before, of any batch size and number of heads.

        Args:
            key_codes: codes of the keys, `[batch, kv_heads, blocks, bytes]`; they are copied, like the others.
            key_parameters: their parameters, `[batch, kv_heads, blocks, numbers]`.
            codes: those of the values, likewise.
            parameters: likewise.
        """
        of_sides = (key_codes, key_parameters), (codes, parameters)
        twin = self._twin([without_spare_room(*packed, GROWTH_DIVISOR) for packed in of_sides])
        twin._count([self.block_tokens] * key_codes.shape[2])
        return twin

    def repacked(self, quantizers: dict[Side, Quantizer], forms: tuple[StateForm, StateForm]) -> Self:
        """The same tokens, packed again by quantizers whose blocks have as many. Keys stay smoothed as they are."""
        held, twin = self.state(), self.__class__(quantizers, forms, self.block_tokens)
        twin.prepare(len(self))
        for start in range(0, len(self), self.blocks_at_once):
            some = slice(start, start + self.blocks_at_once)
            pieces = [(side, DenseSegment(held[f"{side}_codes"], held[f"{side}_parameters"])) for side in SIDES]
            keys, values = (self._side(side, piece, some).states(self.dtype) for side, piece in pieces)
            twin.write(start, keys, values)
        twin.hold(len(self))
        twin._count(list(self._ends), self._first)
        return twin

    def taken(self, blocks: Tensor) -> Self:
        """A copy of the full blocks with the numbers `blocks`, int64 `[count]` on the host."""
        return self.with_codes(*(codes[:, :, blocks] for codes in next(self.segments()).tensors))

    def snapshot(self) -> Self:
        """See `TokenStore.snapshot`."""
        return self._twin([store.snapshot() for store in self.stores])

    def fork(self) -> Self:
        """Independent blocks with the same tokens."""
        return self._twin([store.fork() for store in self.stores])

    def _twin(self, stores: list[DenseStore]) -> Self:
        twin = copy.copy(self)
        twin.stores, twin._ends = stores, list(self._ends)
        return twin

    def clear(self) -> None:
        """Forget all tokens; keep the memory."""
        for store in self.stores:
            store.clear()
        self._count([])

    def share_prefix(self, other: Self, tokens: int, most: int) -> None:
        """Hold the whole blocks of the first `tokens` tokens as `other` holds them, as far as both have the same.

        Args:
            other: what holds them.
            tokens: how many tokens both have.
            most: of how many blocks the keys were smoothed alike.
        """
        if self._first != other._first:
            return
        blocks, held = 0, -self._first
        for end, of_other in zip(self._ends[:most], other._ends, strict=False):
            held += end
            if end != of_other or held > tokens:
                break
            blocks += 1
        if blocks:
            for store, others in zip(self.stores, other.stores, strict=True):
                store.share_prefix(others, blocks)

    def swap_buffers(self, swap: BufferSwap) -> None:
        """See `TokenStore.swap_buffers`."""
        for store in self.stores:
            store.swap_buffers(swap)

    def held_tensors(self) -> Iterator[Tensor]:
        """See `TokenStore.held_tensors`."""
        for store in self.stores:
            yield from store.held_tensors()

    def state(self) -> dict[str, Tensor]:
        """Copies of codes and parameters, and how many tokens of each block are held; empty without blocks."""
        if not self._ends:
            return {}
        tensors: dict[str, Tensor] = {}
        for side, store in zip(SIDES, self.stores, strict=True):
            held = store.state()
            tensors[f"{side}_codes"], tensors[f"{side}_parameters"] = held["keys"], held["values"]
        # On the same device as the other tensors, so that a state moves as a whole.
        ends = [self._first, *self._ends]
        tensors["block_ends"] = torch.tensor(ends, dtype=torch.int64, device=tensors["keys_codes"].device)
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore a state, which `check_packed_state` has checked."""
        self.clear()
        for side, store in zip(SIDES, self.stores, strict=True):
            store.load_state({"keys": tensors[f"{side}_codes"], "values": tensors[f"{side}_parameters"]})
        first, *ends = tensors["block_ends"].tolist()
        self._count(ends, first)


PACKED_NAMES = ("keys_codes", "keys_parameters", "values_codes", "values_parameters", "block_ends")
"""Names of the tensors in the state of packed blocks."""


def _finite_tokens(keys: Tensor, values: Tensor) -> Tensor | None:
    """Which tokens are finite, `[batch, kv_heads, tokens, 1]`; `None` if a CPU knows that all are.

    A sum is not finite if one number is not, and takes a fraction of the time of looking at each number.
    """
    if all(
        states.is_cpu and type(states) is Tensor and bool(states.sum(dtype=torch.float32).isfinite())
        for states in (keys, values)
    ):
        return None
    return (keys.isfinite().all(-1) & values.isfinite().all(-1)).unsqueeze(-1)


def check_packed_state(
    tensors: dict[str, Tensor], quantizers: dict[Side, Quantizer], forms: tuple[StateForm, StateForm], block_tokens: int
) -> int:
    """Tokens in a state of packed blocks.

    Raises:
        StateMismatchError: these quantizers do not make such blocks from states of these forms.
    """
    seen = tensors["block_ends"]
    if seen.dim() != 1 or seen.is_floating_point():
        raise StateMismatchError(
            f"`block_ends` of a state must be integers in one dimension, got {list(seen.shape)} of {seen.dtype}: take "
            "the state again."
        )
    ends: list[Any] = seen.tolist()
    for side, form in zip(SIDES, forms, strict=True):
        packed = packed_forms(BlockLayout(quantizers[side].format, side, form.head_dim, block_tokens), form)
        for name, (batch, kv_heads, width, dtype, _) in zip(("codes", "parameters"), packed, strict=True):
            seen = tensors[f"{side}_{name}"]
            expected = [batch, kv_heads, len(ends) - 1, width]
            if list(seen.shape) != expected or seen.dtype != dtype:
                raise StateMismatchError(
                    f"`{side}_{name}` of a state must be {expected} of {dtype}, got {list(seen.shape)} of "
                    f"{seen.dtype}: take the state again."
                )
    if not all(0 < end <= block_tokens for end in ends[1:]) or len(ends) < 2 or not 0 <= ends[0] < ends[1]:
        raise StateMismatchError(
            f"Blocks of a state must hold 1 to {block_tokens} tokens after the dropped ones, got block_ends {ends}: "
            "take the state again."
        )
    return int(sum(ends[1:]) - ends[0])


def packed_forms(layout: BlockLayout, form: StateForm) -> tuple[StateForm, StateForm]:
    """Forms of the codes and of the parameters of states of a form, in which each block counts as a token."""
    return form._replace(head_dim=layout.code_bytes, dtype=torch.uint8), form._replace(head_dim=layout.parameters)


def block_nbytes(code_format: CodeFormat, side: Side, form: StateForm, block_tokens: int) -> int:
    """Bytes of one block of keys, or of values, for all sequences and heads: its codes, scales and zeros."""
    packed = packed_forms(BlockLayout(code_format, side, form.head_dim, block_tokens), form)
    return sum(nbytes_of(each, 1) for each in packed)
