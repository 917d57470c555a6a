"""`lab/benchmarks/peers.py` asks another process for llama.cpp's figures, and says if it predicts other tokens."""

import pathlib
import sys
from typing import Any

import pytest
import torch

import versions
from models import fresh_model

pytestmark = versions.benchmarks_of_transformers

STAND_IN = """
GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 = 1, 8, 2

class Llama:
    def __init__(self, path, n_ctx, type_k, type_v, **options):
        assert type_k == type_v and options["flash_attn"] and options["n_threads_batch"] == 1
        self.room, self.kind, self.seen = n_ctx, type_k, []
        self.ctx = self
        self.vocab = int(open(path).read())

    def n_vocab(self):
        return self.vocab

    def eval(self, tokens):
        self.seen += tokens
        assert len(self.seen) <= self.room

    def reset(self):
        self.seen = []

    def close(self):
        pass

def llama_get_logits(model):
    # The likeliest token is the number of those that were seen.
    return [float(number == len(model.seen)) for number in range(model.vocab)]

def llama_state_seq_get_size(model, sequence):
    return 1000 * model.kind + len(model.seen)

def llama_print_system_info():
    return b"STAND-IN = 1"
"""


@pytest.fixture
def peers(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    found = script("peers")
    monkeypatch.setattr(found.pages, "RECORDED", tmp_path)
    return found


@pytest.fixture
def gguf(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A file for a stand-in of llama.cpp, which other processes of this interpreter import."""
    folder = tmp_path / "binding"
    folder.mkdir()
    (folder / "llama_cpp.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    path = tmp_path / "model.gguf"
    path.write_text("99")
    return path


def test_the_other_process_answers_each_request(peers: Any, gguf: pathlib.Path) -> None:
    with peers.peer(sys.executable, gguf, 1) as other:
        assert other.build["system"] == "STAND-IN = 1"
        for kv, kind in (("f16", 1), ("q4_0", 2)):
            found = other.read(kv, range(40), range(3))
            assert (found["tokens"], found["nbytes"]) == ([40, 41, 42, 43], 1000 * kind + 43)
            assert len(found["step_seconds"]) == 3
            assert found["seconds"] >= 0


def test_a_process_that_ends_is_named(peers: Any, tmp_path: pathlib.Path) -> None:
    # The interpreter of the tests has no llama-cpp-python, or the file is none.
    with pytest.raises(SystemExit, match="llama-cpp-python"), peers.peer("/bin/true", tmp_path, 1):
        pass


def test_a_cache_here_reads_a_prompt_and_its_steps(peers: Any) -> None:
    model, text = fresh_model("llama"), torch.arange(1, 24)[None]
    with torch.no_grad():
        expected = model(text).logits.argmax(-1)[0, 19:].tolist()
        for make in peers.OWN.values():
            found = peers.read_here(model, make, text[:, :20], text[:, 20:])
            assert len(found["step_seconds"]) == 3
            assert found["nbytes"] > 0
            assert found["tokens"] == expected


def test_each_length_has_every_contender_and_other_tokens_fail(
    peers: Any, gguf: pathlib.Path, found_by: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    class Workload:
        name, model = "tiny", fresh_model("llama")

        def prompt(self, tokens: int) -> torch.Tensor:
            return torch.arange(1, tokens + 1)[None]

    monkeypatch.setattr(peers.report.Session, "real", lambda run, dtype: Workload())
    page = tmp_path / "benchmarks.md"
    page.write_text("\n".join(peers.pages.markers("peers", "peers")))
    monkeypatch.setattr(peers, "PAGE", page)
    arguments = ["--peer-python", sys.executable, "--gguf", str(gguf), "--model", "tiny", "--threads", "1"]
    arguments += ["--lengths", "24,32", "--steps", "2", "--seconds", "0", "--record"]
    # The stand-in predicts numbers of tokens.
    written = found_by(peers, *arguments, code=1)
    assert [line.partition(" at ")[0] for line in written["wrong"]] == 2 * list(peers.PEERS)
    assert set(written["results"]["peers"]["24"]["figures"]) == {*peers.OWN, *peers.PEERS}
    assert set(peers.pages.parts("peers")) == {"24", "32"}
    assert "| llama.cpp, q8_0 | 0.00 s |" in page.read_text()


@pytest.mark.parametrize("arguments", [[], ["--peer-python", "python", "--gguf", "no/such/file"]])
def test_arguments_that_lack_something_are_refused(
    peers: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        peers.main(arguments)
    assert stopped.value.code == 2
    assert "must be" in capsys.readouterr().err
