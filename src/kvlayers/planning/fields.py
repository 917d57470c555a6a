"""Numbers of a config, by name."""

from typing import Any

from kvlayers.errors import ConfigError


class Fields:
    """What a config says of one layer.

    By attribute throughout, as configs have other names for some of these.

    Args:
        config: config of the decoder, or of one of its layers.
    """

    def __init__(self, config: Any) -> None:
        self._config = config

    def get(self, name: str) -> Any:
        """A field, `None` where the config has none."""
        return getattr(self._config, name, None)

    def number(self, *names: str) -> int:
        """The first of these fields that is a number.

        Raises:
            ConfigError: none of them is.
        """
        found = self.number_or_none(*names)
        if found is None:
            raise ConfigError(
                f"expected a config with {' or '.join(names)}, to know the states of its layers, but saw a "
                f"{type(self._config).__name__} without: set it, or pass the config of the model itself."
            )
        return found

    def number_or_none(self, *names: str) -> int | None:
        """The first of these fields that is a number, `None` where none of them is."""
        for name in names:
            found = self.get(name)
            if isinstance(found, int | float) and not isinstance(found, bool):
                return int(found)
        return None
