"""What the tests of commands share."""

from pathlib import Path

import huggingface_hub.constants
import pytest

from model_directories import random_text


@pytest.fixture
def text_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, for reports to go to, with a text in `text.txt`; nothing is asked of the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "text.txt").write_text(random_text(600))
    return tmp_path
