"""Growing in place: what is copied, what is held, and what autograd sees."""

import copy
import itertools
import pickle

import pytest
import torch

from agreement import bytes_reached
from kvlayers import CacheLayer, DynamicCache, DynamicLayer, SlidingLayer, StaticLayer, StaticSlidingLayer, make_cache
from kvlayers.core.buffer import TokenBuffer
from models import tiny_model
from spies import spy

TOKEN_BYTES = 2 * 8 * 4 * 2


def token(tokens: int = 1, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, tokens, 8), torch.randn(batch, 2, tokens, 8)


def read(layer: CacheLayer, *passes: int) -> CacheLayer:
    """The same layer, which has taken in so many tokens at once, one after the other."""
    for tokens in passes:
        layer.update(*token(tokens))
    return layer


def addresses_while_decoding(layer: CacheLayer, tokens: int) -> list[int]:
    return [layer.update(*token())[0].untyped_storage().data_ptr() for _ in range(tokens)]


def test_memory_moves_a_few_times_in_thousands_of_tokens_and_has_little_spare_room() -> None:
    layer, addresses = DynamicLayer(), []
    for length in range(1, 4097):
        addresses += addresses_while_decoding(layer, 1)
        if length >= 1024:
            assert layer.nbytes <= 1.125 * length * TOKEN_BYTES
    moves = sum(before != after for before, after in itertools.pairwise(addresses))
    # Two tokens, steps of 128 tokens up to 1024, then of an eighth: log(4096 / 1024) / log(9 / 8) is 12.
    assert moves <= 1 + 8 + 12 + 1


@pytest.mark.parametrize("name", ["dynamic", "int4", "int8", "recall", "offloaded"])
def test_a_cache_that_is_kept_for_two_tokens_takes_the_bytes_of_a_few(name: str) -> None:
    cache = make_cache(name, tiny_model("llama"))
    cache.update(*token(2), 0)
    assert cache.nbytes <= 4 * TOKEN_BYTES


@pytest.mark.parametrize("tokens", [128, 256, 4096])
def test_a_prompt_has_room_for_a_short_answer_whatever_its_length(tokens: int) -> None:
    layer = read(DynamicLayer(), tokens)
    assert layer.nbytes == (tokens + 128) * TOKEN_BYTES
    assert len(set(addresses_while_decoding(layer, 128))) == 1


def test_a_length_hint_is_reached_without_spare_room_and_is_no_limit() -> None:
    layer = read(DynamicLayer(length_hint=300), *[1] * 300)
    assert layer.nbytes == 300 * TOKEN_BYTES
    assert read(layer, *[1] * 300).length == 600


def test_static_memory_never_moves() -> None:
    for layer in (StaticLayer(200), StaticSlidingLayer(200, 16)):
        assert len(set(addresses_while_decoding(layer, 200))) == 1
        before = layer.nbytes
        layer.reset()
        assert read(layer, 5).nbytes == before


@pytest.mark.parametrize("window", [16, 512])
def test_a_window_holds_little_more_than_itself_after_a_long_prefill(window: int) -> None:
    layer = SlidingLayer(window)
    for passes in ([4096], [1] * 3 * window):
        assert read(layer, *passes).nbytes <= max(64, 1.25 * window) * TOKEN_BYTES


def test_a_window_is_moved_once_for_every_quarter_of_it() -> None:
    layer = read(SlidingLayer(512), 600)
    offsets = [layer.update(*token())[0].storage_offset() for _ in range(1280)]
    moves = sum(after < before for before, after in itertools.pairwise(offsets))
    assert moves <= 1280 // 128


def test_a_window_moves_to_the_front_in_pieces_that_do_not_overlap_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves = []

    def note(buffer: TokenBuffer, start: int, states: torch.Tensor) -> None:
        if states.untyped_storage().data_ptr() == buffer.tensor.untyped_storage().data_ptr():
            moves.append((start, states.storage_offset() // states.shape[3], states.shape[2]))

    spy(monkeypatch, TokenBuffer, "write", note)
    read(SlidingLayer(100), *[1] * 130)
    assert len(moves) == 2 * 4, "99 tokens by 25, of keys and of values"
    assert all(target + count <= source for target, source, count in moves)


def test_a_window_that_its_memory_barely_fits_is_not_copied_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    layer = read(SlidingLayer(4000), 3560)
    spy(monkeypatch, TokenBuffer, "write", lambda buffer, start, states: copied.append(states.shape[2]))
    read(layer, *[1] * 1000)
    assert sum(copied) <= 2 * 1000 * (1 + 8), "of keys and of values, each token once and what moves for it"


@pytest.mark.parametrize("recorded", [[4096], [1] * 500], ids=["a prompt", "tokens one by one"])
def test_a_crop_and_the_end_of_recording_give_its_memory_back(recorded: list[int]) -> None:
    # A crop keeps the window, and recording goes on.
    for end, held in ((lambda layer: layer.crop(-2), 16), (lambda layer: layer.deactivate_past_recording(), 15)):
        layer = SlidingLayer(16)
        layer.activate_past_recording()
        assert read(layer, *recorded).keys.shape[2] == sum(recorded)
        assert layer.nbytes >= sum(recorded) * TOKEN_BYTES
        end(layer)
        assert bytes_reached(layer) == layer.nbytes <= 64 * TOKEN_BYTES
        assert read(layer, 1).keys.shape[2] == held
        assert layer.nbytes <= 64 * TOKEN_BYTES


def test_a_state_that_was_recorded_fits_a_fresh_reservation() -> None:
    layer, again = StaticSlidingLayer(200, 8), StaticSlidingLayer(200, 8)
    layer.activate_past_recording()
    again.load_state(read(layer, 60).state())
    again.crop(-30)
    assert again.length == 30


def test_a_pickle_holds_live_tokens_only() -> None:
    assert len(pickle.dumps(read(SlidingLayer(16), 4096))) < 15 * TOKEN_BYTES + 4000


def test_a_cache_that_requires_grad_can_be_copied() -> None:
    """Upstream, copy.deepcopy raises here."""
    keys, values = (states.requires_grad_() for states in token(3))
    cache = DynamicCache([(keys * 2, values * 2)])
    twin = copy.deepcopy(cache)
    twin.update(*token(), 0)
    assert (cache.get_seq_length(), twin.get_seq_length()) == (3, 4)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("select", ["batch_select_indices", "expand"])
def test_sequences_that_autograd_follows_are_selected_with_their_gradients(select: str, shared: bool) -> None:
    layer, (first, _), (keys, _) = DynamicLayer(), token(200), token(3)
    layer.update(first, first)
    if shared:
        # What comes behind is in a tail of its own.
        twin = layer.fork()
        layer.update(*token())
        layer = twin
    keys.requires_grad_()
    layer.update(keys * 2, keys)
    getattr(layer, select)([0, 0] if select == "batch_select_indices" else 2)
    new = token(1, batch=2)
    attended, _ = layer.update(*new)
    expected = torch.cat([torch.cat([first, keys * 2], 2).expand(2, -1, -1, -1), new[0]], 2)
    assert torch.equal(attended, expected)
    attended.sum().backward()
    assert torch.equal(keys.grad, torch.full_like(keys, 4))
    with torch.inference_mode():
        layer.reorder_cache([1, 0])
    with torch.no_grad():
        assert layer.update(*new)[0].shape == (2, 2, 205, 8)
