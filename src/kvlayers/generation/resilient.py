"""`generate()` that continues with a smaller cache when memory runs out, from the last token it has reached."""

import gc
import traceback
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from kvlayers.generation.call_arguments import check_model, with_prompt_by_name
from kvlayers.generation.call_cache import free_reservations
from kvlayers.generation.ladder import DEFAULT_LADDER, GenerateCall, Rung, RungLike, first_line, suitable_rungs
from kvlayers.upstream import cache_argument
from kvlayers.utils.tensor_memory import is_out_of_memory


class SteppedDownWarning(RuntimeWarning):
    """Memory ran out, and `resilient_generate` continues with another cache."""


def resilient_generate(
    model: Any,
    *args: Any,
    ladder: Iterable[RungLike] = DEFAULT_LADDER,
    **kwargs: Any,
) -> Any:
    """Call `model.generate(*args, **kwargs)`, and step down to a smaller cache whenever memory runs out.

    Greedy decoding and sampling keep the tokens that they have generated; other decoding modes start again from the
    prompt. Each step down warns with `SteppedDownWarning`. The smaller caches are kvlayers' caches, whether or not
    kvlayers is installed.

    Args:
        model: a model of transformers.
        args: as for `model.generate`.
        ladder: the caches to try, in order: names of caches, pairs of a name and its options, or `Rung`s. The cache
            that the call itself requests always comes first, and `None` as the first rung stands for it. If that
            cache is itself a rung, the next one is the rung below it.
        kwargs: as for `model.generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        RegistryError: a rung has an empty or unknown name. This and the next two are raised before anything is
            generated.
        OptionError: `ladder` is empty, or a cache does not take the options of its rung.
        KVLayersError: `ladder` is given, and has a cache that this model cannot use.
        torch.OutOfMemoryError: memory ran out on every rung. The message lists the attempts.

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
    check_model(model)
    args, kwargs = with_prompt_by_name(args, kwargs)
    rungs, unsuitable = suitable_rungs(ladder, model)
    # Nothing else may hold a cache that the call leaves behind.
    kwargs = cache_argument.respelled(model, kwargs, cache_argument.name_in_generate(model))
    call = GenerateCall(model, args, kwargs)
    rung, *below = call.rungs_to_try(rungs)
    history: list[_Failure] = []
    while True:
        try:
            return call.attempt(rung)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            history.append(_Failure(rung, call.tokens_so_far, first_line(error)))
            if not below:
                raise torch.OutOfMemoryError(_all_failed(error, history, unsuitable, call)) from error
            _clear_frames(error)
        # Outside the except block, in which Python keeps the error alive.
        call.drop_callers_cache()
        free_memory()
        rung, *below = below
        warnings.warn(_stepping_down(history[-1], rung, call), SteppedDownWarning, stacklevel=2)


def free_memory() -> None:
    """Free memory that is kept for the next call, garbage, and what the device's allocator keeps in reserve."""
    free_reservations()
    gc.collect()
    # There is only one kind of device besides the CPU.
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of an error and of the errors that led to it, since they hold caches and activations."""
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
    """A rung on which memory ran out. It keeps the error's message, since the error itself would keep memory."""

    rung: Rung
    tokens: int | None
    message: str

    def __str__(self) -> str:
        reached = "" if self.tokens is None else f", after {_tokens(self.tokens)}"
        return f"{self.rung}{reached}: {self.message}"


def _tokens(count: int) -> str:
    return f"{count} new token{'' if count == 1 else 's'}"


def _stepping_down(failure: _Failure, rung: Rung, call: GenerateCall) -> str:
    if call.restart_reason is not None:
        how = f"It starts again from the prompt, as {call.restart_reason}"
    elif call.tokens_so_far:
        how = f"It continues after {_tokens(call.tokens_so_far)}"
    else:
        how = "It starts from the prompt"
    return f"resilient_generate ran out of memory with {failure}. {how}, now with {rung}."


def _all_failed(error: BaseException, history: list[_Failure], unsuitable: list[str], call: GenerateCall) -> str:
    lines = [str(error), "", "resilient_generate ran out of memory on every rung of its ladder:"]
    lines += [f"  {number}. {failure}" for number, failure in enumerate(history, 1)]
    if call.no_other_cache is not None:
        lines.append(f"No other cache was tried, as {call.no_other_cache}.")
    elif unsuitable:
        lines += ["Caches that this model cannot use:", *(f"  - {reason}" for reason in unsuitable)]
    lines.append("Shorten the prompt, generate fewer tokens or sequences at once, or add smaller caches to the ladder.")
    return "\n".join(lines)
