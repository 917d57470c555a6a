"""`generate()` with the caches of kvlayers, and by a store of prefixes, for one call."""

from typing import Any

from transformers.generation.utils import GenerationMixin

from kvlayers.errors import OptionError
from kvlayers.generation.install import own_call
from kvlayers.generation.prefixes import active_store
from kvlayers.prefix import PrefixStore


def generate(
    model: Any, *args: Any, prefix_store: PrefixStore | None = None, namespace: str = "", **kwargs: Any
) -> Any:
    """`model.generate(*args, **kwargs)` with the caches of kvlayers, whether or not it is installed.

    With a store, no token of a prompt is computed that it has states of, and what is computed is held there: a prompt
    with its answer, where there is one of them; what several begin with, or each of them, where there are more.

    Args:
        model: a model of transformers.
        args: as for `model.generate`.
        prefix_store: a store to go by; where not given, the one that `install` was given, if any.
        namespace: whose prefixes they are: another namespace finds nothing of them.
        kwargs: as for `model.generate`.

    Returns:
        What `model.generate` returns.

    Raises:
        OptionError: the call cannot go by a store; the message says why. Or there is a `namespace` without one.

    Example:
        >>> import torch, transformers, kvlayers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99
        ... )
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> store = kvlayers.PrefixStore(max_bytes=2**20)
        >>> ids = kvlayers.generate(model, torch.tensor([[5, 8, 13]]), prefix_store=store, max_new_tokens=4)
        >>> ids = kvlayers.generate(model, ids, prefix_store=store, max_new_tokens=4)
        >>> store.statistics.tokens_covered, store.statistics.tokens_asked
        (6, 10)
    """
    prefixes = active_store.required(prefix_store, namespace)
    if prefixes is None:
        with own_call():
            return model.generate(*args, **kwargs)
    if isinstance(model, GenerationMixin) and type(model).generate is not GenerationMixin.generate:
        raise OptionError(
            f"expected a model whose generate() is that of transformers, but {type(model).__name__} has one of its "
            "own, which may never ask for what a prefix_store has: leave prefix_store out for it."
        )
    with active_store.using(prefixes), own_call():
        return model.generate(*args, **kwargs)
