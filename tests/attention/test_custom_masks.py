"""Masks that callers make for a static cache, of its whole reservation or of the tokens that are held."""

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import counted_graphs
import kvlayers
import versions
from kvlayers.kernels.attention import dense_kernels
from kvlayers.kernels.attention.cpu import kernel
from kvlayers.static import static_store as static
from kvlayers.upstream import compat
from matrix import once, product
from models import WINDOW, fresh_model, given, prompt
from spies import spy

RESERVED = 32
PARTS = (9, 1, 1, 3, 1, 1)
"""Tokens of each forward pass."""
HIDDEN = 2
"""A token that no later token sees, so that the mask is not the one that a model would make."""
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
"""Attention over states in full precision adds up the same float32 numbers in another order."""


def mask_of(form: str, start: int, queries: int, columns: int) -> Tensor:
    """`[1, 1, queries, columns]`, for queries of the tokens from `start` on."""
    query, key = torch.arange(start, start + queries)[:, None], torch.arange(columns)
    seen = ((key <= query) & ((key != HIDDEN) | (query == HIDDEN)))[None, None]
    return seen if form == "bool" else torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def decoded(
    model: Any, cache: Any, ids: Tensor, form: str, columns: int | None, forward: Any = None, parts: Any = PARTS
) -> Tensor:
    """Logits `[batch, tokens, vocabulary]`. The masks have `columns`, or those of the held and the new tokens."""
    logits = []
    with torch.no_grad():
        for part in parts:
            start = int(cache.get_seq_length())
            how = {**versions.positions(ids[:, start : start + part], cache), **given(cache)}
            how["position_ids"] = torch.arange(start, start + part)[None]
            mask = mask_of(form, start, part, start + part if columns is None else columns)
            run = model if forward is None else forward
            logits.append(run(ids[:, start : start + part], attention_mask=mask, **how).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    ("family", "implementation", "form", "columns", "options"),
    [
        *product(
            ["llama", "gpt2"],
            [("sdpa", "bool"), ("sdpa", "additive"), ("eager", "additive")],
            [None, RESERVED],
            [{}, {"offloading": True}, {"grow": True}, {"max_batch_size": 3}],
        ),
        # gemma2 has soft caps.
        *product(["llama", "gemma2"], [("kvlayers", "additive")], [None, RESERVED], [{}]),
        # A window takes masks of as many columns as it attends to.
        ("mistral", "sdpa", "additive", WINDOW, {}),
    ],
)
def test_both_lengths_give_the_logits_of_a_cache_that_grows(
    family: str, implementation: str, form: str, columns: int | None, options: dict[str, Any], installed: None
) -> None:
    changes = {"layer_types": ["full_attention"] * 2} if family == "gemma2" else {}
    parts = (4, 1, 3) if columns == WINDOW else PARTS
    model, ids = fresh_model(family, **changes), prompt(2, sum(parts))
    model.set_attn_implementation("eager" if implementation == "kvlayers" else implementation)
    expected = decoded(model, transformers.DynamicCache(), ids, form, None, parts=parts)
    model.set_attn_implementation(implementation)
    cache = kvlayers.StaticCache(model.config, max_cache_len=RESERVED, **options)
    assert cache.layers[0].is_sliding == (columns == WINDOW)
    torch.testing.assert_close(decoded(model, cache, ids, form, columns, parts=parts), expected, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.skipif(
    not compat.COMPILES_TENSOR_SUBCLASSES, reason="TorchDynamo is known to trace marked keys from torch 2.13"
)
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize(("implementation", "columns"), once(["sdpa", "eager"], [None, RESERVED]))
def test_both_lengths_serve_compiled_code_in_few_graphs(implementation: str, columns: int | None) -> None:
    model, ids = fresh_model("llama", num_hidden_layers=1), prompt(2, 30)
    model.set_attn_implementation(implementation)
    parts = (9, *[1] * 12)
    expected = decoded(model, transformers.DynamicCache(), ids, "additive", None, parts=parts)
    cache = kvlayers.StaticCache(model.config, max_cache_len=RESERVED)
    forward = torch.compile(model.forward, backend=counted_graphs.backend, fullgraph=True)
    logits = decoded(model, cache, ids, "additive", columns, forward, parts)
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    # The prompt, a single token, and single tokens of any length.
    assert counted_graphs.graphs() == 3


def test_custom_masks_and_those_of_the_model_may_take_turns() -> None:
    model, ids = fresh_model("llama"), prompt(2, sum(PARTS))
    cache = kvlayers.StaticCache(model.config, max_cache_len=RESERVED)
    for columns in (RESERVED, None):
        reference = transformers.DynamicCache(config=model.config)
        cache.reset()
        for each, wanted in ((cache, columns), (reference, None)):
            decoded(model, each, ids, "additive", wanted, parts=(9,))
        for at in range(9, 15):
            step = ids[:, at : at + 1]
            with torch.no_grad():
                if at % 2:
                    seen, expected = (model(step, **given(each)).logits for each in (cache, reference))
                else:
                    seen = decoded(model, cache, ids, "additive", columns, parts=(1,))
                    expected = decoded(model, reference, ids, "additive", None, parts=(1,))
            torch.testing.assert_close(seen, expected, **TOLERANCE)


@versions.leaves_masks_as_they_are
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("columns", [RESERVED - 1, RESERVED + 1, 7])
def test_a_mask_of_another_length_is_refused_by_torch(implementation: str, columns: int) -> None:
    model, ids = fresh_model("llama"), prompt(2, 9)
    model.set_attn_implementation(implementation)
    cache = kvlayers.StaticCache(model.config, max_cache_len=RESERVED)
    with pytest.raises(RuntimeError, match="size|expand"):
        decoded(model, cache, ids, "additive", columns, parts=(9,))


class Loop(torch.nn.Module):
    """A model that says nothing of masks."""

    def forward(self, cache: Any, states: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = cache.update(states, -states, 0)
        return keys, values


def cache_of_one_layer() -> Any:
    return kvlayers.StaticCache(transformers.LlamaConfig(num_hidden_layers=1), max_cache_len=RESERVED)


def test_keys_are_plain_in_what_models_do_not_do_to_them() -> None:
    states = torch.randn(2, 2, 9, 8)
    # And without a model.
    assert [type(side) for side in cache_of_one_layer().update(states, -states, 0)] == [Tensor, Tensor]
    keys, values = Loop()(cache_of_one_layer(), states)
    assert type(values) is Tensor
    query = torch.randn(2, 2, 3, 8)
    weights = torch.softmax(query @ keys.transpose(2, 3) / 8**0.5, dim=-1)
    assert type(weights) is Tensor
    expected = scaled_dot_product_attention(query, states, -states)
    torch.testing.assert_close(weights @ values, expected)
    torch.testing.assert_close(scaled_dot_product_attention(query, keys, values), expected)
    # No scores, so no mask.
    assert (keys[..., :1] + torch.zeros(9, RESERVED)).shape == (2, 2, 9, RESERVED)
    # Keys may be in any place.
    for query, value in ((keys, values), (states, keys)):
        found = scaled_dot_product_attention(query, keys, value)
        torch.testing.assert_close(found, scaled_dot_product_attention(query + 0, states, value + 0))
    for twin in (pickle.loads(pickle.dumps(keys)), copy.deepcopy(keys)):
        assert type(twin) is Tensor
        assert torch.equal(twin, states)


@pytest.mark.parametrize("columns", [None, RESERVED], ids=["held", "reserved"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_keys_of_a_few_queries_are_repeated_no_earlier(
    implementation: str, columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_kernels, "CPU_MINIMUM_STATES", 0)
    called: list[int] = []
    spy(monkeypatch, kernel, "attend_dense", lambda query, keys, *others, **options: called.append(keys.shape[1]))
    model, ids = fresh_model("llama"), prompt(2, sum(PARTS))
    model.set_attn_implementation(implementation)
    expected = decoded(model, transformers.DynamicCache(), ids, "additive", None)
    cache = kvlayers.StaticCache(model.config, max_cache_len=RESERVED)
    torch.testing.assert_close(decoded(model, cache, ids, "additive", columns), expected, **TOLERANCE)
    if implementation == "sdpa" and kernel.library() is not None:
        # Prompt and three tokens in each of two layers, with the heads of the keys.
        assert called.count(model.config.num_key_value_heads) >= 4


@pytest.mark.slow
@pytest.mark.usefixtures("counted")
def test_masks_that_a_model_makes_in_compiled_code_are_no_custom_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marked keys could not pass a graph break, as torch compiles no code for them behind it."""
    monkeypatch.setattr(static, "marked_for_custom_masks", None)
    model, ids = fresh_model("llama", num_hidden_layers=1), prompt(2, 11)
    cache = kvlayers.StaticCache(model.config, max_cache_len=RESERVED)
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        for part in ids.split([9, 1, 1], dim=1):
            forward(part, **versions.positions(part, cache), **given(cache))
    assert cache.get_seq_length() == 11
