"""`generate()` that goes on with a smaller cache when memory runs out, whether or not kvlayers is installed."""

from collections.abc import Sequence
from typing import Any

from kvlayers.errors import OptionError
from kvlayers.generation import retried_pass
from kvlayers.generation.call_arguments import check_model
from kvlayers.generation.install import call_with_kvlayers
from kvlayers.memory import LADDER


def resilient_generate(model: Any, *args: Any, ladder: Sequence[str] = LADDER, **kwargs: Any) -> Any:
    """Call `model.generate(*args, **kwargs)`, and make each forward pass again that runs out of memory.

    The cache is kvlayers': the one that the call names or passes, or a `DynamicCache`. For each such pass it gives way
    by one step, in place: to 8 bits, to 4 bits, to the host. Each step warns with `SteppedDownWarning`. Under
    `install()`, every call of `generate()` does this.

    Args:
        model: a model of transformers.
        args: as for `model.generate`.
        ladder: the steps that the cache may take, the first of them first, of "int8", "int4" and "offloaded".
        kwargs: as for `model.generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        OptionError: `ladder` is empty, or has something else. Nothing was generated.
        torch.OutOfMemoryError: no step is left. The message lists the steps that were taken.

    Example:
        >>> import torch, transformers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99
        ... )
        >>> model = transformers.LlamaForCausalLM(config)
        >>> resilient_generate(model, torch.tensor([[5, 8, 13]]), max_new_tokens=4).shape
        torch.Size([1, 7])
    """
    check_model(model)
    if not isinstance(ladder, list | tuple) or not ladder or any(step not in LADDER for step in ladder):
        raise OptionError(
            f"`ladder` must be steps of {', '.join(map(repr, LADDER))}, got {ladder!r}: pass a tuple of them."
        )
    with retried_pass.LADDER.override(ladder), call_with_kvlayers():
        return model.generate(*args, **kwargs)
