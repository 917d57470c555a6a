"""One call of `generate()` with kvlayers' caches and a prefix store, without installing kvlayers."""

from typing import Any

from transformers.generation.utils import GenerationMixin

from kvlayers.errors import OptionError
from kvlayers.generation.install import call_with_kvlayers
from kvlayers.generation.prefixes import active_store
from kvlayers.prefix import PrefixStore


def generate(
    model: Any, *args: Any, prefix_store: PrefixStore | None = None, namespace: str = "", **kwargs: Any
) -> Any:
    """Call `model.generate(*args, **kwargs)` with kvlayers' caches, whether or not kvlayers is installed.

    With a store, the states of a prompt that the store has are not computed again, and newly computed states are
    inserted: with one prompt, those of the prompt and its answer; with several prompts, those of their common prefix,
    or of each prompt.

    Args:
        model: a model of transformers.
        args: as for `model.generate`.
        prefix_store: the store to use. Default: the store that was passed to `install`, if any.
        namespace: the namespace of the store in which the call looks up and inserts. Other namespaces do not see its
            entries. Needs a `prefix_store`.
        kwargs: as for `model.generate`.

    Returns:
        What `model.generate` returns. With a store and `return_dict_in_generate=True`, its attribute `cached_tokens`
        has for each prompt how many of its tokens came from the store; it is empty if a call could not use the store of
        `install()`.

    Raises:
        OptionError: `prefix_store` is not a `PrefixStore`; the call cannot use a store, for the reason in the message;
            or `namespace` is given without a store.

    Example:
        >>> import torch, transformers, kvlayers
        >>> config = transformers.LlamaConfig(
        ...     num_hidden_layers=1, hidden_size=32, intermediate_size=32, num_attention_heads=2, vocab_size=99
        ... )
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> store = kvlayers.PrefixStore(max_bytes=2**20)
        >>> ids = kvlayers.generate(model, torch.tensor([[5, 8, 13]]), prefix_store=store, max_new_tokens=4)
        >>> kvlayers.generate(
        ...     model, ids, prefix_store=store, max_new_tokens=4, return_dict_in_generate=True
        ... ).cached_tokens
        (6,)
    """
    active = active_store.required_store(prefix_store, namespace)
    if active is None:
        with call_with_kvlayers():
            return model.generate(*args, **kwargs)
    if isinstance(model, GenerationMixin) and type(model).generate is not GenerationMixin.generate:
        raise OptionError(
            f"prefix_store needs the generate() of transformers, but {type(model).__name__} has its own, which may "
            "never use the store: leave prefix_store out."
        )
    with active_store.CURRENT.override(active), call_with_kvlayers():
        return model.generate(*args, **kwargs)
