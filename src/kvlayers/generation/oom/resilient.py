"""generate() that goes on with a smaller cache where memory runs out, from the token that it had come to."""

import gc
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kvlayers.generation.oom.attempt import GenerateCall
from kvlayers.generation.oom.ladder import DEFAULT_LADDER, Rung, RungLike, first_line, possible_rungs
from kvlayers.generation.static_pool import free_reservations

OUT_OF_MEMORY_PHRASES = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "alloc_failed",
)
"""What a RuntimeError says where a device has no class for it: MPS, the CPU's allocators, CUDA's libraries."""


class SteppedDownWarning(RuntimeWarning):
    """Memory ran out, and `resilient_generate` goes on with another cache."""


def resilient_generate(
    model: Any,
    *args: Any,
    ladder: Iterable[RungLike] = DEFAULT_LADDER,
    **kwargs: Any,
) -> Any:
    """`model.generate(*args, **kwargs)`, which steps down to smaller caches where memory runs out.

    Greedy decoding and sampling keep the tokens that they have; other ways of decoding start again from the prompt.
    Each step down is a `SteppedDownWarning`. Smaller caches are made by kvlayers, whether or not it is installed.

    Args:
        model: a model of transformers.
        args: as for `model.generate`.
        ladder: what to try, in order: names of caches, pairs of a name and its options, or `Rung`s. What the call
            itself asks for comes first, whether or not the ladder begins with it (as `None`). Where that is a rung as
            well, what follows is the rung below it.
        kwargs: as for `model.generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        RegistryError: before anything is generated, a rung is empty, or names a cache that there is not.
        OptionError: before anything is generated, the ladder is empty, or a rung's cache does not take its options.
        KVLayersError: before anything is generated, the caller's own ladder has a cache that this model cannot have.
        torch.OutOfMemoryError: memory ran out on every rung. The message says what was tried.

    Example:
        >>> import torch, transformers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> ids = torch.tensor([[5, 8, 13]])
        >>> smaller = ["int4", ("offloaded_quantized", {"nbits": 2})]
        >>> output = resilient_generate(model, ids, max_new_tokens=4, ladder=smaller)
        >>> output.shape
        torch.Size([1, 7])
    """
    rungs, impossible = possible_rungs(ladder, model)
    call = GenerateCall(model, args, kwargs)
    rung, *below = call.rungs_below_what_is_asked_for(rungs)
    history: list[_Failure] = []
    while True:
        try:
            return call.attempt(rung)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            history.append(_Failure(rung, call.tokens_so_far, first_line(error)))
            if not below:
                raise torch.OutOfMemoryError(_all_failed(error, history, impossible, call)) from error
            _let_go_of_frames(error)
        # Not in the except block, where Python still holds the error.
        call.let_go_of_the_callers_cache()
        free_memory()
        rung, *below = below
        warnings.warn(_stepping_down(history[-1], rung, call), SteppedDownWarning, stacklevel=2)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated.

    Example:
        >>> is_out_of_memory(RuntimeError("MPS backend out of memory")), is_out_of_memory(RuntimeError("bad shape"))
        (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in OUT_OF_MEMORY_PHRASES)


def free_memory() -> None:
    """Let go of what nobody needs: memory kept for the next call, garbage, and what the device's allocator keeps."""
    free_reservations()
    gc.collect()
    # Whatever devices the model is on: there is one kind beside the CPU.
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


def _let_go_of_frames(error: BaseException) -> None:
    """Empty the frames that an error, and those before it, were raised through: they hold caches and activations."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    for raised in chain:
        traceback.clear_frames(raised.__traceback__)
        raised.__traceback__ = None


@dataclass(frozen=True)
class _Failure:
    """A rung on which memory ran out. Keeps the error's words, and not the error, which would keep memory."""

    rung: Rung
    tokens: int | None
    words: str

    def __str__(self) -> str:
        reached = "" if self.tokens is None else f", after {_tokens(self.tokens)}"
        return f"{self.rung}{reached}: {self.words}"


def _tokens(count: int) -> str:
    return f"{count} new token{'' if count == 1 else 's'}"


def _stepping_down(failure: _Failure, rung: Rung, call: GenerateCall) -> str:
    if call.starts_again is not None:
        how = f"It starts again from the prompt, as {call.starts_again}"
    elif call.tokens_so_far:
        how = f"It goes on after the {_tokens(call.tokens_so_far)} that it has"
    else:
        how = "It starts from the prompt"
    return f"resilient_generate ran out of memory with {failure}. {how}, now with {rung}."


def _all_failed(error: BaseException, history: list[_Failure], impossible: list[str], call: GenerateCall) -> str:
    lines = [str(error), "", "resilient_generate ran out of memory on every rung of its ladder:"]
    lines += [f"  {number}. {failure}" for number, failure in enumerate(history, 1)]
    if call.no_other_cache is not None:
        lines.append(f"No other cache was tried, as {call.no_other_cache}.")
    elif impossible:
        lines += ["Caches that this model cannot have:", *(f"  - {reason}" for reason in impossible)]
    lines.append("Shorten the prompt, generate fewer tokens or sequences at once, or add smaller caches to the ladder.")
    return "\n".join(lines)
