"""Caches as inputs and outputs of programs of `torch.export`: the logits of eager code, for any number of tokens."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
import transformers

import kvlayers
from kvlayers import DynamicCache
from kvlayers.upstream import cache_argument, compat
from models import fresh_model, prompt, tiny_model

NAME = cache_argument.usual_name()
PROMPT = 12
"""More than the window of 8."""
LENGTH = 20
AUTO = torch.export.Dim.AUTO
TOLERANCE = 1e-5
"""Attention in a program adds up the same float32 numbers in another order."""

pytestmark = pytest.mark.skipif(
    not compat.TELLS_EXPORTING, reason=f"torch {compat.TORCH} does not tell exporting from compiling, as from 2.7 on"
)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """Other tests meet torch as it is without."""
    with torch.no_grad():
        kvlayers.register_export_support()
        yield
    _deregister()


def _kinds(kind: type = kvlayers.Cache) -> Iterator[type]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _kinds(subclass)


def _deregister() -> None:
    for kind in _kinds():
        if kind in pytree.SUPPORTED_NODES:
            pytree._deregister_pytree_node(kind)


def small_model(family: str) -> Any:
    """One layer of each kind, as each one more is traced as well."""
    changes = {"llama": {"num_hidden_layers": 1}}.get(family, {})
    return fresh_model(family, **changes)


def filled(model: Any, ids: torch.Tensor, cache: Any = None) -> Any:
    cache = DynamicCache(config=model.config) if cache is None else cache
    model(ids, **{NAME: cache})
    return cache


def step_program(model: Any, cache: DynamicCache, dynamic_shapes: Any = None) -> Any:
    """A program that decodes one token behind however many a cache like `cache` holds."""
    inputs = {"input_ids": torch.tensor([[3]]), NAME: cache, "use_cache": True}
    if dynamic_shapes is None:
        held = len(pytree.tree_leaves(cache)) // 2
        tokens = [[{2: AUTO} for _ in range(held)] for _ in range(2)]
        dynamic_shapes = {"input_ids": None, NAME: tokens, "use_cache": None}
    return torch.export.export(model, (), inputs, dynamic_shapes=dynamic_shapes, strict=False)


def check_decoding(program: Any, model: Any, ids: torch.Tensor) -> None:
    """Each program's cache is the next one's input; the last is decoded with by eager code."""
    cache, decode, logits = filled(model, ids[:, :PROMPT]), program.module(), []
    for position in range(PROMPT, LENGTH):
        output = decode(input_ids=ids[:, position : position + 1], **{NAME: cache}, use_cache=True)
        cache = output.past_key_values
        assert type(cache) is DynamicCache
        assert cache.get_seq_length() == position + 1
        logits.append(output.logits)
    logits.append(model(ids[:, LENGTH:], **{NAME: cache}).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids).logits[:, PROMPT:], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "by_tensors"), [("llama", True), ("gemma2", False)])
def test_one_program_decodes_behind_any_number_of_tokens(family: str, by_tensors: bool) -> None:
    """gemma2 has a window, which has dropped tokens: transformers' own cache forgets how many."""
    model, ids = small_model(family), prompt(1, LENGTH + 3, seed=4)
    cache, shapes = filled(model, ids[:, :PROMPT]), torch.export.ShapesCollection()
    for layer in cache.layers:
        shapes[layer.keys] = shapes[layer.values] = {2: AUTO}
    program = step_program(model, cache, shapes if by_tensors else None)
    assert len(program.graph_signature.output_specs) == 1 + 2 * model.config.num_hidden_layers
    check_decoding(program, model, ids)
    # torch would pickle the cache, and not read it again.
    program.example_inputs = None
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    check_decoding(torch.export.load(file), model, ids)


def test_a_program_takes_a_prompt_in_and_returns_its_cache() -> None:
    model, ids = small_model("gemma2"), prompt(1, PROMPT + 3)
    inputs = {"input_ids": ids[:, :PROMPT], "use_cache": True}
    empty = DynamicCache(config=model.config)
    prefill = torch.export.export(model, (), {**inputs, NAME: empty}, strict=False).module()
    output = prefill(**inputs, **{NAME: DynamicCache(config=model.config)})
    assert empty.get_seq_length() == 0, "what is traced is not taken in"
    behind = model(ids[:, PROMPT:], **{NAME: output.past_key_values}).logits
    logits = torch.cat([output.logits, behind], dim=1)
    torch.testing.assert_close(logits, model(ids).logits, atol=TOLERANCE, rtol=0)


def test_a_pair_is_a_tree_of_its_parts() -> None:
    model, ids = tiny_model("t5"), prompt(1, 5)
    encoded = model.get_encoder()(prompt(1, 9, seed=2)).last_hidden_state
    cache = kvlayers.EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    expected = model(encoder_outputs=(encoded,), decoder_input_ids=ids).logits
    model(encoder_outputs=(encoded,), decoder_input_ids=ids[:, :3], **{NAME: cache})
    leaves, spec = pytree.tree_flatten(cache)
    assert len(leaves) == 4 * model.config.num_layers
    twin = pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)
    step = model(encoder_outputs=(encoded,), decoder_input_ids=ids[:, 3:], **{NAME: twin}).logits
    # T5 does not scale the products, so that its logits are larger, and round by more.
    torch.testing.assert_close(step, expected[:, 3:], atol=1e-4, rtol=0)


def test_what_is_made_of_leaves_is_independent() -> None:
    model, ids = tiny_model("gemma2"), prompt(2, PROMPT + 1)
    cache = filled(model, ids[:, :5])
    twin = pytree.tree_map(lambda leaf: leaf, cache)
    twin.crop(-2)
    model(prompt(2, 4, seed=9), **{NAME: twin})
    seen = model(ids[:, 5:], **{NAME: cache}).logits
    torch.testing.assert_close(seen, model(ids).logits[:, 5:], atol=TOLERANCE, rtol=0)


def test_leaves_are_listed_as_those_of_transformers() -> None:
    model, ids = tiny_model("llama"), prompt(1, 5)
    paths, _ = pytree.tree_flatten_with_path(filled(model, ids))
    lists = [(name, index) for name in ("key_cache", "value_cache") for index in range(2)]
    assert [(path[0].key, path[1].idx) for path, _ in paths] == lists
    assert pytree.tree_leaves(DynamicCache(config=model.config)) == []


REFUSED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "static": ("llama", lambda model: kvlayers.StaticCache(model.config, 64), "got a StaticCache"),
    "int4": ("llama", lambda model: kvlayers.make_cache("int4", model), "got a QuantizedCache"),
    "offloaded": ("llama", lambda model: kvlayers.make_cache("offloaded", model), "got an? Offloaded"),
    "offloaded layers": ("llama", lambda model: DynamicCache(config=model.config, offloading=True), "OffloadedLayer"),
    "sinks": ("llama", lambda model: kvlayers.SinkCache(8, 2, config=model.config), "a SinkCache"),
    "evicting": ("llama", lambda model: kvlayers.EvictingCache(model, rule="knorm"), "got a EvictingCache"),
    "recall": ("llama", lambda model: kvlayers.make_cache("recall", model), "got a RecallLayer"),
    "recurrent states": ("jamba", lambda model: DynamicCache(config=model.config), "keys and values alone"),
    # Which of the tokens it has dropped, it could not say.
    "a full window": (
        "mistral",
        lambda model: filled(model, prompt(1, PROMPT)),
        "got 7 of 12 tokens: export with kvlayers.ExportableDecoder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_caches_that_are_no_trees_are_refused(case: str) -> None:
    family, make, says = REFUSED[case]
    with pytest.raises(kvlayers.errors.UnsupportedLayerError, match=says):
        pytree.tree_flatten(make(tiny_model(family)))


def test_exporters_say_why_a_cache_is_no_tree() -> None:
    model = fresh_model("llama")  # an exporter of transformers leaves an attribute on it
    cache = filled(model, prompt(1, PROMPT), kvlayers.QuantizedCache(config=model.config, residual_length=4))
    inputs, refused = {"input_ids": prompt(1, 1), NAME: cache}, kvlayers.errors.UnsupportedLayerError
    with pytest.raises(refused, match="a QuantizedCache"):
        torch.export.export(model, (), inputs, strict=False)
    if compat.HAS_EXPORTERS:
        from transformers.exporters.exporter_dynamo import DynamoExporter

        with kvlayers.installed(), pytest.raises(refused, match="a QuantizedCache"):
            DynamoExporter().export(model, inputs, {"dynamic": False})
    assert cache.get_seq_length() == PROMPT


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_cannot_contain_a_cache_that_evicts(strict: bool) -> None:
    class Reader(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny_model("llama")
            self.cache = kvlayers.EvictingCache(self.model, rule="knorm", keep=0.5)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(ids, **{NAME: self.cache}).logits

    with pytest.raises(Exception, match="A cache that evicts cannot be part of an exported program") as caught:
        torch.export.export(Reader(), (prompt(1, 150),), strict=strict)
    assert strict or isinstance(caught.value, kvlayers.errors.UnsupportedLayerError)


def test_nothing_is_registered_before_it_is_asked_for() -> None:
    _deregister()
    with kvlayers.installed():
        DynamicCache()
    assert not any(kind in pytree.SUPPORTED_NODES for kind in _kinds())
    kvlayers.register_export_support()
    node = pytree.SUPPORTED_NODES[DynamicCache]
    kvlayers.register_export_support()
    assert pytree.SUPPORTED_NODES[DynamicCache] is node


@pytest.mark.skipif(not compat.HAS_EXPORTERS, reason=f"transformers {transformers.__version__} has no exporters")
def test_exporters_of_transformers_take_the_caches_of_generate() -> None:
    from transformers.exporters.exporter_dynamo import DynamoExporter, register_pytree_node
    from transformers.exporters.utils import decompose_prefill_decode

    _deregister()
    # As they do for each cache that they see, by its attributes.
    register_pytree_node(DynamicCache)
    model, ids = small_model("gemma2"), prompt(1, PROMPT)
    with kvlayers.installed():
        parts = decompose_prefill_decode(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        copied, inputs = parts["decode"]
        cache = inputs[NAME]
        assert type(cache) is DynamicCache
        expected = model(inputs["input_ids"], **{NAME: cache.fork()}).logits
        program = DynamoExporter().export(copied, dict(inputs), {"dynamic": False})
    inputs = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor | DynamicCache)}
    # Before 5.23, what is exported is not called itself.
    run = program.module() if isinstance(program, torch.export.ExportedProgram) else program
    output = run(**inputs)
    torch.testing.assert_close(output.logits, expected, atol=TOLERANCE, rtol=0)
    assert output.past_key_values.get_seq_length() == PROMPT + 1
