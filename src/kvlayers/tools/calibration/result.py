"""What a calibration found, and its file."""

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
"""What the file is called in the directory of a model."""


@dataclass(frozen=True)
class MeasuredSetting:
    """Bits, and what they come to.

    Attributes:
        cache_config: options of a `QuantizedCache`.
        bytes_per_token: bytes that a packed token takes over all layers that are quantized.
        divergence: mean KL divergence in nats from full precision, on the texts of the calibration, as they are read
            in chunks through such a cache.
    """

    cache_config: dict[str, Any]
    bytes_per_token: float
    divergence: float


@dataclass(frozen=True)
class Calibration:
    """Bits for each layer of a model, for keys and for values, and what was measured on the way.

    Attributes:
        chosen: the bits of each layer.
        uniform: the best setting with the same bits in every layer that takes no more bytes, `None` where none does.
        sensitivities: what each part does when it alone is quantized.
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
        """Options of a `QuantizedCache`, and the `cache_config` of `cache_implementation="quantized"`."""
        return self.chosen.cache_config

    @property
    def divergence(self) -> float:
        """Mean KL divergence in nats from full precision, on the texts of the calibration."""
        return self.chosen.divergence

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a packed token takes over all layers that are quantized."""
        return self.chosen.bytes_per_token

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as JSON, beside the model or anywhere else.

        Args:
            path: a directory, such as the model's, for a file `kvlayers_calibration.json` in it; or a file that ends
                in `.json`. What is missing of directories is made; another calibration is replaced.

        Returns:
            Where it is.

        Raises:
            OptionError: no file can be written there, or there is one that is no calibration.
        """
        file = file_of(path)
        if file.exists():
            type(self).load(file)
        try:
            # After so long a measurement, a directory that is missing is no reason to lose it.
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise OptionError(f"expected to write {file}, but {error.strerror or error}: name another file.") from error
        return file

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` has written.

        Args:
            path: as for `save`.

        Raises:
            OptionError: there is no such file, it is no calibration, or its bits are none.
        """
        file = file_of(path)
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
            uniform = said["uniform"]
            return cls(
                _setting(said["chosen"]),
                None if uniform is None else _setting(uniform),
                tuple(_sensitivity(part) for part in said["sensitivities"]),
            )
        except OSError as error:
            raise OptionError(
                f"expected a calibration in {file}, but it cannot be read ({error.strerror or error}): write one with "
                "Calibration.save()."
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise OptionError(
                f"expected what Calibration.save() writes, but saw something else in {file} "
                f"({type(error).__name__}: {error}): name another file, or calibrate again."
            ) from error


def file_of(path: str | os.PathLike[str]) -> Path:
    """The file that is written for a path: itself if it ends in `.json`, else one in that directory."""
    given = Path(path)
    return given if given.suffix == ".json" and not given.is_dir() else given / FILE_NAME


def _setting(said: dict[str, Any]) -> MeasuredSetting:
    options = QuantizedCacheConfig(**said["cache_config"])
    return MeasuredSetting(dict(options), float(said["bytes_per_token"]), float(said["divergence"]))


def _sensitivity(said: dict[str, Any]) -> Sensitivity:
    if said["side"] not in ("keys", "values"):
        raise ValueError(f"side {said['side']!r}")
    by_bits = {int(nbits): float(loss) for nbits, loss in said["divergence"].items()}
    return Sensitivity(int(said["layer"]), said["side"], by_bits)
