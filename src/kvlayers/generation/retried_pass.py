"""A forward pass that runs out of memory: its cache goes back, gives way by one step, and the pass is made again.

The loop of `generate()` never notices. What it streams, draws and counts comes after a pass. Layers that cannot go back
by one pass, such as windows and recurrent states, read earlier tokens again.
"""

import functools
import gc
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.core.forward_pass import PassStart
from kvlayers.core.token_layer import TokenLayer
from kvlayers.errors import InterruptedPassError, RollbackError
from kvlayers.generation import call_cache
from kvlayers.generation.current_call import CURRENT, USES_KVLAYERS, CurrentCall, Inputs
from kvlayers.generation.patching import ScopedValue
from kvlayers.generation.prefill import pass_tokens, without_last
from kvlayers.upstream import cache_argument, generate_calls, model_types
from kvlayers.upstream.callers import warn_the_caller
from kvlayers.utils.tensor_memory import is_out_of_memory


class SteppedDownWarning(RuntimeWarning):
    """Memory ran out in a forward pass, which is made again with a cache that takes less."""


LADDER: ScopedValue[Sequence[str] | None] = ScopedValue("ladder", None)
"""The steps that the caches of calls may take, `None` for all."""

OF_PASS = ("cache_position", "next_sequence_length", "is_first_iteration")
"""Inputs of a pass that say which of the tokens it takes."""


def make_room(
    cache: Cache, began: PassStart | None, error: BaseException, check_readable: Callable[[int], object]
) -> tuple[int, int]:
    """Let a cache give way after a forward pass that failed, so that the same pass can be made again.

    Args:
        cache: the cache of the pass.
        began: what `newest_pass()` of the cache was before the pass.
        error: what ended the pass, raised again if memory did not run out. Else the frames in which it was raised are
            cleared, since they hold activations.
        check_readable: raises `RollbackError` if so many tokens, all that the cache had seen, cannot be read again.

    Returns:
        How many tokens the cache had seen, and how many of these it holds now: the others are to be read again.

    Raises:
        OutOfMemoryError: memory ran out, but the cache cannot be put back, or has no step left. The message has the
            steps that it has taken.
    """
    if not may_retry(error):
        raise error
    _clear_frames(error)
    try:
        length, kept = _put_back(cache, began, check_readable)
        release_memory()
        step = cache.give_way(LADDER.get())
        if step is None:
            raise RollbackError(f"its {type(cache).__name__} has no step left to give way by")
    except (RollbackError, InterruptedPassError) as reason:
        steps = ", ".join(cache.steps_taken) or "none"
        raise torch.OutOfMemoryError(
            f"{error}\n\nThe forward pass could not be made again with less memory, as {reason} (steps taken: {steps})"
            ". Shorten the prompt, set prefill_chunk_size, generate fewer tokens or sequences at once, or begin with a "
            'smaller cache, such as cache_implementation="offloaded_quantized".'
        ) from error
    _warn("A forward pass ran out of memory", error, "It is made again", step)
    return length, kept


def make_room_between(cache: Cache, error: BaseException, changed: int) -> None:
    """Let a cache give way after memory ran out between passes, while its sequences were selected or repeated.

    That is done in calls of `generate()` alone, as it rounds what the cache holds.

    Args:
        cache: the cache.
        error: what ended the change. It is raised again if memory did not run out.
        changed: number of the layer that it ended in; those before it have changed.

    Raises:
        OutOfMemoryError: outside of a call, or there is no step left. If layers would differ, the cache is reset.
    """
    if not is_out_of_memory(error):
        raise error
    # Such a layer changes as a whole or not at all.
    is_whole = isinstance(cache.adapted_layers()[changed].unwrapped, TokenLayer)
    step = None
    if is_whole and USES_KVLAYERS.get():
        _clear_frames(error)
        release_memory()
        step = cache.give_way(LADDER.get())
    if step is None:
        is_same = is_whole and not changed
        if not is_same:
            cache.reset()
        raise torch.OutOfMemoryError(
            f"{error}\n\nMemory ran out while the sequences of a {type(cache).__name__} were selected or repeated. It "
            f"{'is as it was' if is_same else 'was reset, since its layers would differ: pass all tokens again'}. Use "
            "fewer beams or sequences, or a cache that takes less memory: call pack(4) or offload() before, or pass "
            "max_bytes=..."
        ) from error
    _warn("Memory ran out between forward passes", error, "The call goes on", step)


def _warn(what: str, error: BaseException, then: str, step: str) -> None:
    reason = f"{type(error).__name__}: {''.join(str(error).splitlines()[:1]).rstrip('.')}"
    warn_the_caller(f"{what} ({reason}). {then}, and its cache has given way by one step: {step}.", SteppedDownWarning)


def make_room_in_call(model: Any, cache: Cache, began: PassStart | None, error: BaseException) -> None:
    """As `make_room`, for a pass of a loop of `generate()`; also read again what must be."""
    call = CURRENT.get()
    length, kept = make_room(cache, began, error, functools.partial(_whole_inputs, call))
    if kept < length:
        newest = call.inputs
        ids, given = _whole_inputs(call, length)
        arguments = {name: value for name, value in given.items() if name not in OF_PASS}
        pass_tokens(model, ids[:, :length], without_last(arguments, ids.shape[1] - length), cache, kept)
        call.inputs = newest


def pass_unseen(
    model: Any,
    ids: Tensor,
    cache: Cache,
    chunk: int | None = None,
    positions: Tensor | None = None,
    logits: int = 1,
    **arguments: Any,
) -> Any:
    """Pass those of the tokens `[1, tokens]` to a model that its cache has not seen.

    A pass that runs out of memory is made again, as often as the cache can give way.

    Args:
        model: the model.
        ids: all tokens.
        cache: the cache.
        chunk: tokens of one forward pass. Default: as many as the model can take.
        positions: of all tokens, `[1, tokens]` or `[axes, 1, tokens]`. Default: 0, 1, 2 and so on.
        logits: the newest tokens whose logits are needed. Without any, the weights of the vocabulary are not read.
        arguments: further arguments of the model.

    Returns:
        The output of the last forward pass.
    """
    arguments |= {cache_argument.name_in_generate(model): cache, "attention_mask": None, "use_cache": True}
    arguments |= model_types.newest_logits_only(model, logits)
    if "position_ids" in generate_calls.forward_arguments(model):
        arguments["position_ids"] = (
            torch.arange(ids.shape[1], device=ids.device)[None] if positions is None else positions
        )
    while True:
        began = cache.newest_pass()
        try:
            return pass_tokens(model, ids, arguments, cache, cache.length, chunk)
        except (RuntimeError, MemoryError) as error:
            make_room(cache, began, error, lambda length: None)


def read_again(model: Any, prompts: Sequence[Tensor], caches: Sequence[Cache]) -> list[Tensor]:
    """Read the tokens `[1, tokens]` of each of several sequences into a cache of its own, which may know other ones.

    Returns:
        For each, the logits after its last token, `[1, vocab]`.
    """
    logits = []
    for ids, cache in zip(prompts, caches, strict=True):
        cache.reset()
        logits.append(pass_unseen(model, ids, cache).logits[:, -1])
    return logits


def level(caches: Sequence[Cache]) -> None:
    """Let caches give way as often as the one that has done so most often, so that they can be rows of one."""
    most = max(len(cache.steps_taken) for cache in caches)
    for cache in caches:
        while len(cache.steps_taken) < most and cache.give_way(LADDER.get()) is not None:
            pass


def say_why_not(error: BaseException) -> None:
    """Add to an error for lack of memory why no pass was made again, unless that was said."""
    if may_retry(error) and sys.version_info >= (3, 11):
        error.add_note(
            "No forward pass was made again with less memory: that is done for passes with a cache of kvlayers, and "
            "memory ran out elsewhere: in an encoder, in compiled code, outside of forward passes, or in a call with "
            "use_cache=False or with a cache of transformers."
        )


def may_retry(error: BaseException) -> bool:
    """Whether memory ran out, and nobody has said yet that the pass cannot be made again."""
    return is_out_of_memory(error) and (error.__cause__ is None or not is_out_of_memory(error.__cause__))


def _put_back(cache: Cache, began: PassStart | None, check_readable: Callable[[int], object]) -> tuple[int, int]:
    """Put all layers back to where they were before a pass that was interrupted.

    Returns:
        How many tokens they had seen, and how many of these they hold now: the others must be read again.

    Raises:
        RollbackError: they cannot be put back, or nobody knows where.
        InterruptedPassError: some rows cannot.
    """
    newest = cache.newest_pass()
    # Without a new one, no layer has been updated.
    length = newest.length if newest is not None and newest is not began else cache.most_seen()
    if length is None:
        raise RollbackError(f"nobody knows how many tokens its {type(cache).__name__} had seen before")
    try:
        kept = cache.nearest_restorable(length)
    except RollbackError:
        kept = 0
    if kept < length:
        check_readable(length)
    if kept == 0 and len(set(cache.row_lengths)) > 1:
        cache.reset()
    else:
        cache.truncate(kept)
    return length, kept


def _whole_inputs(call: CurrentCall, length: int) -> Inputs:
    """The inputs of a pass that are whole sequences of more than `length` tokens.

    Raises:
        RollbackError: the call has none.
    """
    for ids, arguments in filter(None, (call.inputs, call.prompt)):
        mask = arguments.get("attention_mask")
        # transformers leaves out a mask of ones, and embeddings may be of other tokens than the ids beside them.
        is_whole = (
            call.record is not None
            and call.record.is_whole
            and arguments.get("inputs_embeds") is None
            and (not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] == ids.shape[1])
        )
        if is_whole and length < ids.shape[1]:
            return ids, arguments
    raise RollbackError("its layers cannot be put back, and earlier tokens cannot be read again")


def release_memory() -> None:
    """Free memory that is kept for the next call, garbage, and what the device's allocator keeps in reserve."""
    call_cache.free_reservations()
    gc.collect()
    # There is only one kind of device besides the CPU.
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and of the errors that led to it, since they hold activations."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        traceback.clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__
