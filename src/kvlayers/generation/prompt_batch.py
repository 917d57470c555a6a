"""The prompts of one call of `generate()`, without the padding that gives them the same length."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptBatch:
    """Prompts side by side, padded on the left.

    Attributes:
        input_ids: int64 `[rows, tokens]`.
        padding: tokens of padding before each prompt.
    """

    input_ids: Tensor
    padding: tuple[int, ...]

    @classmethod
    def from_mask(cls, input_ids: Tensor, attention_mask: Tensor | None) -> "PromptBatch | None":
        """The prompts of a padded batch; `None` if the mask excludes anything but the first tokens of a row.

        Args:
            input_ids: int64 `[rows, tokens]`.
            attention_mask: `[rows, tokens]`, 0 for padding; `None` if there is no padding.
        """
        rows, tokens = input_ids.shape
        if attention_mask is None:
            return cls(input_ids, (0,) * rows)
        if attention_mask.shape != input_ids.shape:
            return None
        is_token = attention_mask.ne(0).cpu()
        padding = tokens - is_token.sum(dim=1)
        is_left = torch.equal(is_token, torch.arange(tokens) >= padding[:, None])
        return cls(input_ids, tuple(padding.tolist())) if is_left and int(padding.max()) < tokens else None

    def __len__(self) -> int:
        return len(self.padding)

    @property
    def is_padded(self) -> bool:
        """Whether any prompt has padding before it."""
        return any(self.padding)

    def row(self, index: int) -> Tensor:
        """The tokens of one prompt, `[1, tokens]`."""
        return self.input_ids[index : index + 1, self.padding[index] :]

    def rows(self) -> list[Tensor]:
        """The tokens of each prompt, `[1, tokens]`."""
        return [self.row(index) for index in range(len(self))]

    def common_prefix_length(self) -> int:
        """How many tokens all prompts start with; always less than the length of the shortest prompt."""
        first, *others = self.rows()
        common = self.input_ids.shape[1] - max(self.padding) - 1
        for other in others:
            differing = (first[0, :common] != other[0, :common]).nonzero()
            common = int(differing[0]) if len(differing) else common
        return common

    def with_padding_after(self, common: int) -> tuple[Tensor, Tensor]:
        """The prompts with their padding moved behind the first `common` tokens, and the mask that excludes it.

        If all prompts start with these tokens, the tokens then have the same slots in every row and can be held once.

        Returns:
            Ids and mask, int64 `[rows, tokens]`.
        """
        ids, mask = self.input_ids.clone(), torch.ones_like(self.input_ids)
        for index, padding in enumerate(self.padding):
            ids[index, :common] = self.input_ids[index, padding : padding + common]
            ids[index, common : common + padding] = self.input_ids[index, :padding]
            mask[index, common : common + padding] = 0
        return ids, mask


def is_token_ids(input_ids: object) -> bool:
    """Whether `input_ids` is an int64 tensor `[rows, tokens]` with at least one row and one token."""
    return (
        isinstance(input_ids, Tensor)
        and input_ids.dtype == torch.int64
        and input_ids.dim() == 2
        and 0 not in input_ids.shape
    )
