"""Which tokens of a layer an eviction keeps."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class KeptTokens:
    """The tokens to keep of each sequence and KV head. Heads may keep different numbers of them.

    Attributes:
        indices: int64 `[batch, kv_heads, most]`, numbers of tokens that the layer held, ascending, in the last `counts`
            places. The places in front of them are 0.
        counts: int64 `[batch, kv_heads]` on the host, how many tokens are kept.
    """

    indices: Tensor
    counts: Tensor

    @property
    def are_even(self) -> bool:
        """Whether all heads of all sequences keep the same number of tokens."""
        return bool((self.counts == self.indices.shape[2]).all())
