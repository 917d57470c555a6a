"""What models differ in when they are called."""

import inspect
from typing import Any


def last_token_alone(model: Any) -> dict[str, int]:
    """Arguments that make a model compute logits of the last token alone; none where it cannot.

    Example:
        >>> import torch, transformers
        >>> with torch.device("meta"):
        ...     last_token_alone(transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1)))
        {'logits_to_keep': 1}
    """
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
