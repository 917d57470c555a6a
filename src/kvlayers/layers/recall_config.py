"""Options of recall: how many pages a query attends to, and which tokens it always attends to."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from typing_extensions import Self

from kvlayers.attention.segment_kinds import DENSE_PIECE_TOKENS
from kvlayers.errors import OptionError
from kvlayers.stores.description import Fact, Facts
from kvlayers.utils.options import as_options, mapping_option


@mapping_option("recall")
@dataclass(frozen=True)
class Recall:
    """How a single query finds the pages that it attends to, in a layer that keeps every token.

    Args:
        pages: pages that each KV head attends to, besides the first and the newest tokens; "all" for full attention.
        page_tokens: tokens of a page, 1 to 64. Packed states are read in blocks, so it must be the size of their block,
            which is 64 unless groups along tokens are longer.
        sink_tokens: first tokens of a sequence that every query attends to, with the rest of their pages.
        recent_tokens: newest tokens that every query attends to, with the rest of their pages. The query's own token is
            among them, so it is at least 1.

    Raises:
        OptionError: a value that is no number of tokens or of pages, or too small, or too large.

    Example:
        >>> import kvlayers
        >>> kvlayers.layers.Recall(pages=32)
        Recall(pages=32, page_tokens=64, sink_tokens=4, recent_tokens=64)
    """

    pages: int | Literal["all"] = 64
    page_tokens: int = DENSE_PIECE_TOKENS
    sink_tokens: int = 4
    recent_tokens: int = 64

    def __post_init__(self) -> None:
        if self.pages != "all":
            _check_number("pages", self.pages, 1, ', or "all"')
        _check_number("page_tokens", self.page_tokens, 1)
        if self.page_tokens > DENSE_PIECE_TOKENS:
            raise OptionError(
                f"`page_tokens` of recall must be at most {DENSE_PIECE_TOKENS}, which kernels read at once, got "
                f"{self.page_tokens}: pass fewer tokens, and more pages."
            )
        _check_number("sink_tokens", self.sink_tokens, 0)
        _check_number("recent_tokens", self.recent_tokens, 1)

    @classmethod
    def of(cls, given: "Recall | Mapping[str, Any]") -> "Recall":
        """The `Recall` for the option `recall` of a cache: a `Recall`, or a mapping of its arguments.

        Raises:
            OptionError: the option is something else, or names an argument that does not exist.
        """
        return as_options(cls, given, "{'pages': 64}, or {'pages': 'all'}")

    def facts(self) -> dict[str, Fact]:
        """All options as plain facts. Their names differ from those of the facts of stores."""
        return {f"recall_{field.name}": getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_facts(cls, facts: Facts) -> Self:
        """The recall with these `facts`, which may contain other facts too."""
        given: dict[str, Any] = {field.name: facts[f"recall_{field.name}"] for field in fields(cls)}
        return cls(**given)

    @classmethod
    def in_facts(cls, facts: Mapping[str, Any]) -> Self | None:
        """As `from_facts`, or `None` if the facts have no recall."""
        return cls.from_facts(facts) if "recall_pages" in facts else None


def _check_number(name: str, number: object, least: int, alternative: str = "") -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise OptionError(f"`{name}` of recall must be a whole number, at least {least}{alternative}, got {number!r}.")
