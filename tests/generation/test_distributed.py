"""Models on several ranks: split by heads by transformers, or copied by torch, with a cache on each rank."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers

import distributed_ranks
import kvlayers
from kvlayers.upstream.generate_calls import static_shape
from models import COMMON, fresh_model

RANKS = 2
HELPERS = pathlib.Path(__file__).parents[1] / "helpers"

needs_gloo = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="torch is built without gloo, the one backend for CPUs",
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, pathlib.Path]:
    """A model with an even number of kv_heads and of tokens, as ranks are, and where it is saved."""
    assert COMMON["num_key_value_heads"] % RANKS == 0
    directory = tmp_path_factory.mktemp("llama")
    model = fresh_model("llama", vocab_size=96)
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="module")
def written(saved: tuple[Any, pathlib.Path], tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where each rank has written what it has found."""
    output = tmp_path_factory.mktemp("ranks")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    path = os.pathsep.join([str(pathlib.Path(kvlayers.__file__).parents[1]), str(HELPERS)])
    done = subprocess.run(
        [*launch, str(HELPERS / "distributed_ranks.py"), str(saved[1]), str(output)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return output


def test_a_model_that_is_divided_does_not_say_how_many_heads_a_device_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model("llama")
    layers = model.config.num_hidden_layers
    assert static_shape(model) == ([COMMON["num_key_value_heads"]] * layers, [model.config.head_dim] * layers)
    monkeypatch.setattr(model, "_tp_size", RANKS, raising=False)
    assert static_shape(model) is None


@pytest.mark.slow
@pytest.mark.nightly
@needs_gloo
def test_ranks_that_share_the_heads_write_the_tokens_of_one(
    saved: tuple[Any, pathlib.Path], written: pathlib.Path
) -> None:
    model, _ = saved
    expected = distributed_ranks.continuations(model)
    for rank in range(RANKS):
        seen = json.loads((written / f"tokens.{rank}").read_text())
        assert seen.keys() == expected.keys()
        for way, (tokens, kv_heads) in expected.items():
            assert seen[way] == [tokens, kv_heads // RANKS], way


@pytest.mark.slow
@pytest.mark.nightly
@needs_gloo
def test_replicas_have_the_logits_and_gradients_of_one_process(
    saved: tuple[Any, pathlib.Path], written: pathlib.Path
) -> None:
    _, directory = saved
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    expected = distributed_ranks.train(model, *distributed_ranks.batch(), model.config)
    seen = [torch.load(written / f"training.{rank}") for rank in range(RANKS)]
    for part in ("logits", "decoded"):
        torch.testing.assert_close(torch.cat([rank[part] for rank in seen]), expected[part], rtol=1e-4, atol=1e-4)
    for rank in seen:
        for mine, theirs in zip(rank["gradients"], expected["gradients"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
