"""Numbers of a config, by name."""

from typing import Any

from kvlayers.errors import ConfigError
from kvlayers.upstream.model_types import listed_per_layer


class ConfigNumbers:
    """Reads the fields of a config that say what one layer holds.

    Fields are read as attributes, since configs have aliases for some of them.

    Args:
        config: config of the decoder, or of one of its layers.
        layer: index of the layer, for fields that list a number for each layer.
    """

    def __init__(self, config: Any, layer: int = 0) -> None:
        self._config = config
        self._layer = layer

    def get(self, name: str) -> Any:
        """A field, `None` if the config does not have it."""
        return getattr(self._config, name, None)

    def number(self, *names: str) -> int:
        """The first of these fields that is a number.

        Raises:
            ConfigError: no field is a number, or one lists numbers for fewer layers than there are.
        """
        found = self.number_or_none(*names)
        if found is None:
            raise ConfigError(
                f"The config ({type(self._config).__name__}) has no number in {' or '.join(names)}, which says what "
                "its layers hold: set it, or pass the config of the model itself."
            )
        return found

    def number_or_none(self, *names: str) -> int | None:
        """The first of these fields that is a number, `None` if no field is."""
        for name in names:
            found = self.get(name)
            if isinstance(found, list | tuple):
                found = listed_per_layer(self._config, name)[self._layer]
            if isinstance(found, int | float) and not isinstance(found, bool):
                return int(found)
        return None
