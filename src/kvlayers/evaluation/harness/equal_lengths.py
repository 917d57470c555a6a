"""Generation from prompts of different lengths, without padding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def generate_equal_lengths(
    generate: Callable[..., Tensor],
    pad_token_id: int,
    context: Tensor,
    max_length: int,
    attention_mask: Tensor,
    **arguments: Any,
) -> Tensor:
    """Generate from left-padded prompts in groups of equal lengths, so that no cache rounds or evicts padding.

    Args:
        generate: takes `context`, `max_length`, `attention_mask` and `arguments`; returns `[rows, tokens]`.
        pad_token_id: the id that fills up shorter answers.
        context: ids of the prompts, padded on the left, int64 `[batch, tokens]`.
        max_length: tokens of a padded prompt and its answer, at most.
        attention_mask: 0 for padding, `[batch, tokens]`.
        arguments: passed on.

    Returns:
        The padded prompts and their answers, int64 `[batch, tokens]`.
    """
    width = context.shape[1]
    lengths = attention_mask.sum(dim=1).tolist()
    answers: dict[int, Tensor] = {}
    for length in sorted(set(lengths)):
        rows = [row for row, own in enumerate(lengths) if own == length]
        ids, mask = (each[rows, width - length :] for each in (context, attention_mask))
        new_length = length + max_length - width
        sequences = generate(ids, max_length=new_length, attention_mask=mask, **arguments)
        answers |= zip(rows, sequences[:, length:], strict=True)
    longest = max(len(answer) for answer in answers.values())
    output = context.new_full((len(lengths), width + longest), pad_token_id)
    output[:, :width] = context
    for row, answer in answers.items():
        output[row, width : width + len(answer)] = answer
    return torch.as_tensor(output)
