"""The prompts of one call of `generate()`, without the padding that makes them equally long."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PromptRows:
    """Prompts side by side, padded on the left.

    Attributes:
        input_ids: int64 `[rows, tokens]`.
        padding: tokens of padding before each.
    """

    input_ids: Tensor
    padding: tuple[int, ...]

    @classmethod
    def of(cls, input_ids: Tensor, attention_mask: Tensor | None) -> "PromptRows | None":
        """The prompts, `None` where the mask leaves out others than the first tokens of a row.

        Args:
            input_ids: int64 `[rows, tokens]`.
            attention_mask: `[rows, tokens]`, 0 for padding; `None` for none.
        """
        rows, tokens = input_ids.shape
        if attention_mask is None:
            return cls(input_ids, (0,) * rows)
        if attention_mask.shape != input_ids.shape:
            return None
        kept = attention_mask.ne(0).cpu()
        padding = tokens - kept.sum(dim=1)
        is_left = torch.equal(kept, torch.arange(tokens) >= padding[:, None])
        return cls(input_ids, tuple(padding.tolist())) if is_left and int(padding.max()) < tokens else None

    def __len__(self) -> int:
        return len(self.padding)

    @property
    def is_padded(self) -> bool:
        """Whether any of them has padding before it."""
        return any(self.padding)

    def row(self, index: int) -> Tensor:
        """The tokens of one prompt, `[1, tokens]`."""
        return self.input_ids[index : index + 1, self.padding[index] :]

    def rows(self) -> list[Tensor]:
        """The tokens of each prompt, `[1, tokens]`."""
        return [self.row(index) for index in range(len(self))]

    def common_tokens(self) -> int:
        """How many tokens all of them begin with, at most as many as the shortest has but for its last."""
        first, *others = self.rows()
        least = self.input_ids.shape[1] - max(self.padding) - 1
        for other in others:
            differing = (first[0, :least] != other[0, :least]).nonzero()
            least = int(differing[0]) if len(differing) else least
        return least

    def with_padding_behind(self, common: int) -> tuple[Tensor, Tensor]:
        """The prompts with their padding behind the first `common` tokens, and a mask that leaves it out.

        Where all begin alike, those tokens are then in the same places, and can be held once.

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
    """Whether these are the ids of tokens, int64 `[rows, tokens]`, at least one of each."""
    return (
        isinstance(input_ids, Tensor)
        and input_ids.dtype == torch.int64
        and input_ids.dim() == 2
        and 0 not in input_ids.shape
    )
