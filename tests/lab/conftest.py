"""What the tests of commands share."""

from pathlib import Path

import huggingface_hub.constants
import pytest

from model_directories import random_text

CACHES = """
import kvlayers, transformers

def windowed(config):
    return kvlayers.SinkCache(64, 4, config=config)

def full(config):
    return transformers.DynamicCache(config=config)

class Failing(kvlayers.DynamicCache):
    def update(self, *args, **kwargs):
        if self.get_seq_length() >= 96:
            raise RuntimeError("no more\\nthan 96")
        return super().update(*args, **kwargs)

def failing(config):
    return Failing(config=config)
"""


@pytest.fixture
def text_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, for reports to go to, with a text and with caches; nothing is asked of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "text.txt").write_text(random_text(600))
    (tmp_path / "caches_of_a_user.py").write_text(CACHES)
    return tmp_path
