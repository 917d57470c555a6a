"""The result of a calibration, and its file."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self

from kvlayers.caches.quantized import QuantizedCacheConfig
from kvlayers.errors import OptionError
from kvlayers.tools.calibration.sensitivities import Sensitivity

FILE_NAME = "kvlayers_calibration.json"
"""Name of the file in the directory of a model."""


@dataclass(frozen=True)
class MeasuredSetting:
    """Bits of each layer, and their measured cost.

    Attributes:
        cache_config: options of a `QuantizedCache`.
        bytes_per_token: bytes that a packed token takes over all quantized layers.
        divergence: mean KL divergence from full precision in nats, on the texts of the calibration, read in chunks
            through such a cache.
    """

    cache_config: dict[str, Any]
    bytes_per_token: float
    divergence: float


@dataclass(frozen=True)
class Calibration:
    """Bits for the keys and the values of each layer of a model, with the measurements behind them.

    Attributes:
        chosen: the chosen bits.
        uniform: the best setting with the same bits in every layer that takes no more bytes; `None` if every such
            setting takes more.
        sensitivities: the divergence if one part alone is quantized, for each part.
    """

    chosen: MeasuredSetting
    uniform: MeasuredSetting | None
    sensitivities: tuple[Sensitivity, ...]

    def __str__(self) -> str:
        found = f"Calibration: {self.bytes_per_token:g} bytes a token, divergence {self.divergence:.3g}"
        if self.uniform is None:
            return found
        alike = self.uniform
        return f"{found}; uniform bits: {alike.bytes_per_token:g} bytes a token, divergence {alike.divergence:.3g}"

    @property
    def cache_config(self) -> dict[str, Any]:
        """Options of a `QuantizedCache`, or the `cache_config` of `cache_implementation="quantized"`."""
        return self.chosen.cache_config

    @property
    def divergence(self) -> float:
        """Mean KL divergence from full precision in nats, on the texts of the calibration."""
        return self.chosen.divergence

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a packed token takes over all quantized layers."""
        return self.chosen.bytes_per_token

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the calibration as JSON.

        Args:
            path: a file that ends in `.json`, or a directory, such as the model's, for `kvlayers_calibration.json` in
                it. Missing directories are made. A file with another calibration is replaced.

        Returns:
            Path of the file.

        Raises:
            OptionError: the file cannot be written, or it exists and is not a calibration.
        """
        file = file_of(path)
        if file.exists():
            type(self).load(file)
        try:
            # A missing directory should not lose minutes of measurement.
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(
                f"`path`: {file} cannot be written ({error.strerror or error}): name another file."
            ) from error
        return file

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote.

        Args:
            path: the file, or its directory, as for `save`.

        Raises:
            OptionError: the file does not exist, is not a calibration, or has invalid bits.
        """
        file = file_of(path)
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            uniform = content["uniform"]
            return cls(
                _setting(content["chosen"]),
                None if uniform is None else _setting(uniform),
                tuple(_sensitivity(part) for part in content["sensitivities"]),
            )
        except OSError as error:
            raise OptionError(
                f"`path`: {file} cannot be read ({error.strerror or error}): pass a file that Calibration.save() wrote."
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise OptionError(
                f"`path`: {file} is not a calibration that Calibration.save() wrote ({type(error).__name__}: {error}): "
                "name another file, or calibrate again."
            ) from error


def file_of(path: str | os.PathLike[str]) -> Path:
    """The file for a path: the path itself if it ends in `.json`, otherwise `FILE_NAME` in that directory."""
    named = Path(path)
    return named if named.suffix == ".json" and not named.is_dir() else named / FILE_NAME


def _setting(entry: dict[str, Any]) -> MeasuredSetting:
    options = QuantizedCacheConfig(**entry["cache_config"])
    return MeasuredSetting(dict(options), float(entry["bytes_per_token"]), float(entry["divergence"]))


def _sensitivity(entry: dict[str, Any]) -> Sensitivity:
    if entry["side"] not in ("keys", "values"):
        raise ValueError(f"side {entry['side']!r}")
    by_bits = {int(nbits): float(loss) for nbits, loss in entry["divergence"].items()}
    return Sensitivity(int(entry["layer"]), entry["side"], by_bits)
