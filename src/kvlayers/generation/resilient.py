"""`generate()` that goes on with a smaller cache when memory runs out, whether or not kvlayers is installed."""

from typing import Any

from kvlayers.generation.call_arguments import check_model
from kvlayers.generation.install import call_with_kvlayers


def resilient_generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `model.generate(*args, **kwargs)`, and make each forward pass again that runs out of memory.

    The cache is kvlayers': the one that the call names or passes, or a `DynamicCache`. For each such pass it gives way
    by one step, in place: to 8 bits, to 4 bits, to the host. Each step warns with `SteppedDownWarning`. Under
    `install()`, every call of `generate()` does this.

    Args:
        model: a model of transformers.
        args: as for `model.generate`.
        kwargs: as for `model.generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        torch.OutOfMemoryError: no step is left. The message lists those that were taken.

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
    with call_with_kvlayers():
        return model.generate(*args, **kwargs)
