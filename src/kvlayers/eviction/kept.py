"""Which tokens of a layer an eviction keeps."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """For each sequence and KV head the tokens to keep, which need not be as many for each.

    Attributes:
        indices: int64 `[batch, kv_heads, most]`, numbers of tokens that the layer held, ascending, in the last `counts`
            places. The places in front of them are 0.
        counts: int64 `[batch, kv_heads]` on the host, how many tokens are kept.
    """

    indices: Tensor
    counts: Tensor

    @property
    def are_even(self) -> bool:
        """Whether each sequence and head keeps as many tokens."""
        return bool((self.counts == self.indices.shape[2]).all())
