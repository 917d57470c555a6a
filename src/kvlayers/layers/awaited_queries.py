"""The queries that an evicting layer expects attention to show."""

from dataclasses import dataclass

from kvlayers.errors import UnsupportedLayerError
from kvlayers.eviction.settings import EvictionSettings
from kvlayers.stores.contract import KVPair


@dataclass(frozen=True, eq=False, slots=True)
class AwaitedQueries:
    """The newest tokens, whose queries attention has not shown. Without tokens, nothing is expected.

    Attributes:
        tokens: how many.
        new: their keys and values, if an eviction waits for the queries: they are not stored yet.
    """

    tokens: int = 0
    new: KVPair | None = None

    @property
    def unstored(self) -> int:
        """Tokens that are not stored yet."""
        return 0 if self.new is None else self.tokens

    def check_shown(self, settings: EvictionSettings) -> None:
        """Raise `UnsupportedLayerError` if an eviction still waits for the queries."""
        if self.new is not None:
            raise UnsupportedLayerError(
                f"The eviction rule {settings.rule_shown} needs the queries of the newest {self.tokens} tokens, but "
                "the attention of the model has not shown them: use attn_implementation='sdpa', 'eager' or 'kvlayers' "
                "without torch.compile, or a rule without queries, such as 'keydiff'. reset() or crop() takes these "
                "tokens back."
            )


NOTHING = AwaitedQueries()
