"""Kinds that no other room imports can be removed: without their folders and lines, everything else works."""

import ast
import pathlib
import re
import shutil

import pytest

import fresh_process

ROOT = pathlib.Path(__file__).parents[2]
ROOMS = ("recall", "sinks")
"""Which kinds these are, `test_rooms.py` holds."""

WORKS = """
import importlib, pkgutil, sys
sys.path.insert(0, {sources!r})
import torch
import kvlayers, kvlayers.layers, kvlayers.stores
from kvlayers.errors import RegistryError

for module in pkgutil.walk_packages(kvlayers.__path__, "kvlayers."):
    if not module.name.startswith(("kvlayers.commands", "kvlayers.__main__", "kvlayers.kernels")):
        importlib.import_module(module.name)
for name in kvlayers.__all__:
    getattr(kvlayers, name)
import transformers
config = transformers.LlamaConfig(vocab_size=31, hidden_size=64, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
model = transformers.AutoModelForCausalLM.from_config(config).eval()
ids = torch.arange(3, 23)[None]
assert kvlayers.__file__.startswith({sources!r})
names = set(kvlayers.cache_names())
assert names.issuperset(("dynamic", "static", "int4", "offloaded", "evicting", "auto"))
with kvlayers.installed():
    # One rule of eviction stands for the others.
    left_out = ("auto", "sliding_window", "hybrid", "hybrid_chunked", *kvlayers.eviction.BUILTIN_RULES)
    for name in sorted(names.difference(left_out)):
        options = dict(keep=0.5) if name == "evicting" else dict()
        model.generate(ids, cache_implementation=name, cache_config=options, max_new_tokens=2, do_sample=False)
plan = kvlayers.plan(config, 40)
assert {{"dynamic", "static", "int4", "offloaded", "snapkv"}} <= {{cache.name for cache in plan.caches}}
with torch.no_grad():
    for name in ("dynamic", "static", "int4", "offloaded", "offloaded_static", "fp8"):
        cache = kvlayers.make_cache(name, model, length_hint=40)
        model(ids, past_key_values=cache)
        kvlayers.save_cache(cache, {file!r})
        loaded = kvlayers.load_cache({file!r}, config=config)
        expected = model(ids[:, :1], past_key_values=cache.fork()).logits
        assert torch.equal(model(ids[:, :1], past_key_values=loaded).logits, expected), name
for refused, words in (
    (lambda: kvlayers.make_cache("recall", model), "unknown cache name"),
    (lambda: kvlayers.make_cache("sink", model), "unknown cache name"),
    (lambda: kvlayers.DynamicCache(recall=dict(pages=4)), "'recall'"),
):
    try:
        refused()
    except RegistryError as error:
        assert words in str(error), error
    else:
        raise AssertionError("it works without its room")
"""


def without_names(path: pathlib.Path, room: str) -> None:
    """Remove from a list of public names what it imports from a room."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith((f"kvlayers.{room}.", f"{room}.")):
            names |= {alias.name for alias in node.names}
            lines[node.lineno - 1 : node.end_lineno] = ["\n"] * (node.end_lineno - node.lineno + 1)
    path.write_text("".join(line for line in lines if not re.fullmatch(rf'\s*"({"|".join(names or {"-"})})",\n', line)))


def without(room: str, package: pathlib.Path) -> None:
    """Remove a room from a package."""
    shutil.rmtree(package / room)
    table = package / "rooms.py"
    table.write_text("".join(line for line in table.read_text().splitlines(True) if f"kvlayers.{room}" not in line))
    facade = package / "layers.py"
    public = set(re.findall(r'^    "(\w+)",$', facade.read_text(), re.M))
    without_names(facade, room)
    gone = public - set(re.findall(r'^    "(\w+)",$', facade.read_text(), re.M))
    stub = package / "__init__.pyi"
    without_names(stub, room)
    stub.write_text(
        "".join(
            line for line in stub.read_text().splitlines(True) if not any(re.search(rf"\b{n}\b", line) for n in gone)
        )
    )


@pytest.mark.slow
def test_everything_else_works_without_these_rooms(tmp_path: pathlib.Path) -> None:
    """None of them imports another, as `test_rooms.py` says, so that one run shows what each alone would."""
    sources = shutil.copytree(ROOT / "src", tmp_path / "src")
    for room in ROOMS:
        without(room, sources / "kvlayers")
    ran = fresh_process.run(WORKS.format(sources=str(sources), file=str(tmp_path / "cache.kv")))
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.count("Error") == 0
