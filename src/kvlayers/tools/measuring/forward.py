"""What models differ in when they are called."""

import inspect
from typing import Any


def newest_alone(model: Any, tokens: int = 1) -> dict[str, int]:
    """Arguments that make a model compute logits of the newest tokens alone; none where it cannot.

    Example:
        >>> import torch, transformers
        >>> with torch.device("meta"):
        ...     newest_alone(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1)))
        {'logits_to_keep': 1}
    """
    return {"logits_to_keep": tokens} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
