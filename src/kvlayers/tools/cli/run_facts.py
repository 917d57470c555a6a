"""Which model a command measured, and on what: the facts that every result states."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self

from kvlayers.tools.cli.output import plain
from kvlayers.tools.demo.model import LoadedModel
from kvlayers.tools.measuring.environment import environment
from kvlayers.utils.units import readable_bytes


@dataclass(frozen=True)
class RunFacts:
    """The model of a run, and where it ran.

    Attributes:
        model: name of the model.
        dtype: dtype that the model computes in.
        device: device of the model.
        environment: hardware, versions and date, from `environment()`.
    """

    model: str
    dtype: torch.dtype
    device: torch.device
    environment: Mapping[str, Any]

    @classmethod
    def of(cls, loaded: LoadedModel) -> Self:
        """The facts of a run with this model, now and here."""
        return cls(loaded.name, loaded.model.dtype, loaded.model.device, environment())

    def plain(self) -> dict[str, Any]:
        """The facts as JSON types."""
        return {"model": self.model, "dtype": self.dtype, "device": str(self.device), **self.environment}

    @property
    def settings(self) -> dict[str, str]:
        """Model, dtype and device, as a report names them."""
        return {"Model": self.model, "Dtype": str(plain(self.dtype)), "Device": str(self.device)}

    @property
    def machine(self) -> dict[str, str]:
        """Hardware, versions and date, as a report names them."""
        hardware, versions = self.environment["hardware"], self.environment["versions"]
        memory = "" if hardware["ram_bytes"] is None else f", {readable_bytes(hardware['ram_bytes'])}"
        cpu = {"CPU": f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['threads']} threads{memory}"}
        gpu = {} if hardware["cuda"] is None else {"GPU": hardware["cuda"]}
        packages = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "platform")
        return {
            **cpu,
            **gpu,
            "System": versions["platform"],
            "Versions": packages,
            "Date": self.environment["date"],
        }
