"""An option of caches: how much of their past recurrent layers keep."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvlayers.core.description import OptionFacts
from kvlayers.errors import OptionError
from kvlayers.utils.options import as_options, mapping_option


@mapping_option("checkpoints")
@dataclass(frozen=True)
class Checkpoints(OptionFacts):
    """When a recurrent layer takes checkpoints, and how many it keeps.

    A checkpoint is taken at the end of each update of several tokens (so at the end of the prompt), every `every`
    tokens, and where a past that may be taken back begins (`activate_past_recording`, and each rollback while
    recording). Compiled code takes no checkpoints. A checkpoint takes as much memory as the states of the layer,
    whatever the number of tokens.

    Args:
        every: take a checkpoint every `every` tokens as well; `None` to leave that out.
        most: the most checkpoints to keep; the oldest is dropped first. While a past is recorded, at least two are
            kept.

    Raises:
        OptionError: a value that is not a whole number, or too small.

    Example:
        >>> import kvlayers
        >>> kvlayers.layers.Checkpoints(every=256, most=8)
        Checkpoints(every=256, most=8)
    """

    fact_names: ClassVar[Mapping[str, str]] = {"every": "checkpoint_every", "most": "most_checkpoints"}

    every: int | None = None
    most: int = 2

    def __post_init__(self) -> None:
        if self.every is not None:
            _check_count(self.every, "every", 1)
        _check_count(self.most, "most", 0)

    @classmethod
    def of(cls, given: "Checkpoints | Mapping[str, int | None] | None") -> "Checkpoints":
        """The `Checkpoints` for the option `checkpoints` of a cache: a `Checkpoints`, or a mapping of its arguments.

        Raises:
            OptionError: the option is something else, or names an argument that does not exist.
        """
        if given is None:
            return cls()
        return as_options(cls, given, "{'every': 64}")

    def due_at(self, length: int) -> bool:
        """Whether a checkpoint is due at this number of tokens."""
        return self.most > 0 and self.every is not None and length > 0 and length % self.every == 0


def _check_count(number: object, name: str, least: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise OptionError(
            f"expected {name} of the checkpoints to be a whole number, at least {least}, but saw {number!r}."
        )
