"""The config of a model that is named on the command line."""

import os
from pathlib import Path

import transformers
from transformers import PretrainedConfig

from kvlayers.errors import ConfigError
from kvlayers.tools.cli.files import home_expanded


def config_of(name: str) -> PretrainedConfig:
    """The config in a directory, in a JSON file, or of a model on the hub; its weights are not loaded.

    Raises:
        ConfigError: there is none.
    """
    path = home_expanded(Path(name))
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"expected a directory with a config.json, but saw none in {path}: name that of a model.")
    if not path.exists() and (name.startswith((".", "~", os.sep)) or len(path.parts) > 2):
        raise ConfigError(f"expected a model's directory or its config.json, but there is nothing at {path}.")
    try:
        # Without a word on it, transformers asks whoever is at the terminal whether to run a repository's code.
        return transformers.AutoConfig.from_pretrained(str(path) if path.exists() else name, trust_remote_code=False)
    # What is wrong with a config comes as whatever the code raises that stumbles over it.
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise ConfigError(
            f"expected a model's directory, its config.json, or its name on the hub, but {name} is none that can be "
            f"read ({said}): check the name, or download the config and name the file."
        ) from error
