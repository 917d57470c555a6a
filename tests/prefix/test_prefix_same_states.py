"""Whatever uses a store asks the same: whether states depend on tokens, weights and settings that are compared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import kvlayers
import kvlayers_lab
from kvlayers.errors import OptionError
from matrix import once
from models import fresh_model

IDS = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(3))
HOW: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def generate(model: Any, ids: torch.Tensor, store: Any) -> list[int]:
    found: list[int] = kvlayers.generate(model, ids, prefix_store=store, **HOW)[0, ids.shape[1] :].tolist()
    return found


def generate_many(model: Any, ids: torch.Tensor, store: Any) -> list[int]:
    (answer,) = kvlayers.generate_many(model, [ids[0].tolist()], prefix_store=store, progress=False, **HOW)
    found: list[int] = answer.ids.tolist()
    return found


def documents(model: Any, ids: torch.Tensor, store: Any) -> list[int]:
    found: list[int] = kvlayers.generate(
        model, documents=[ids[0, :-1]], question=ids[0, -1:], recompute=0, prefix_store=store, **HOW
    )[0, ids.shape[1] :].tolist()
    return found


def document(model: Any, ids: torch.Tensor, store: Any) -> None:
    kvlayers.store_document(store, ids, model)


def score(model: Any, ids: torch.Tensor, store: Any) -> None:
    kvlayers_lab.score(model, [ids[0].tolist()], [[[5]]], prefix_store=store, progress=False)


USES: tuple[Callable[..., Any], ...] = (generate, generate_many, documents, document, score)


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + 3.0)


def replaced(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = lambda states, forward=mlp.forward: forward(states) + 3.0


def attends_otherwise(model: Any) -> None:
    model.set_attn_implementation("mine")


def has_a_function(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.Identity().eval()
    model.model.layers[0].mlp.act_fn.scale = lambda: 3.0


def of_its_class(model: Any) -> None:
    mlp = type(model.model.layers[0].mlp)
    mlp.forward = lambda self, states: states * 0.5


CHANGES = {
    hooked: "model.layers.0.mlp has hooks",
    replaced: r"forward\(\) of model.layers.0.mlp is not the one of its class",
    attends_otherwise: "attn_implementation='mine' is no function of transformers",
    has_a_function: "model.layers.0.mlp.act_fn",
    of_its_class: r"forward\(\) of model.layers.0.mlp is not the one of its class",
}


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, query, key, value * 0.2, mask, **options)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "mine", mine)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "mine", sdpa_mask)
    mlp = transformers.models.llama.modeling_llama.LlamaMLP
    # To be put back after each test.
    monkeypatch.setattr(mlp, "forward", mlp.forward)


@pytest.mark.parametrize(("use", "change"), once(USES, CHANGES, times=2))
def test_states_that_cannot_be_compared_reach_no_store(use: Callable[..., Any], change: Callable[[Any], None]) -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    change(model)
    with pytest.raises(OptionError, match=CHANGES[change]):
        use(model, IDS, store)
    assert len(store) == 0


def test_a_forward_that_was_put_back_is_the_one_of_its_class() -> None:
    """Once a call has asked for hidden states, transformers 5.0 leaves the method of the class as an attribute."""
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    for layer in model.model.layers:
        layer.forward = layer.forward
    for _ in range(2):
        generate(model, IDS, store)
    assert store.statistics.hits == 1


@pytest.mark.parametrize("first", [generate, generate_many])
@pytest.mark.parametrize("then", [generate, generate_many])
def test_other_implementations_of_attention_do_not_share(first: Callable[..., Any], then: Callable[..., Any]) -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    first(model, IDS[:, :35], store)
    model.set_attn_implementation("eager")
    then(model, IDS, store)
    assert (store.statistics.hits, len(store)) == (0, 2)
    model.set_attn_implementation("sdpa")
    then(model, IDS, store)
    assert store.statistics.hits == 1


def test_a_function_in_the_place_of_one_of_transformers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    table = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(table, "sdpa", table["mine"])
    with pytest.raises(OptionError, match="attn_implementation='sdpa'"):
        generate(model, IDS, store)


def test_a_model_that_changes_between_two_prompts_is_noticed() -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    prompts = [IDS[0].tolist()] * 3
    answers = kvlayers.generate_many(model, prompts, prefix_store=store, max_rows=1, progress=False, **HOW)
    assert next(answers).error is None
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    right = model.generate(IDS, attention_mask=torch.ones_like(IDS), **HOW)[0, 40:].tolist()
    second = next(answers)
    assert (second.ids.tolist(), second.cached_tokens) == (right, 0)
    hooked(model)
    assert isinstance(next(answers).error, OptionError)
    assert len(store) == 2


def test_a_hook_of_all_modules_is_noticed() -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    with (
        torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: None),
        pytest.raises(OptionError, match="all modules have hooks"),
    ):
        generate_many(model, IDS, store)
    assert generate_many(model, IDS, store) == generate(model, IDS, store)


def test_a_model_that_changes_while_a_prompt_is_read_has_it_in_no_store() -> None:
    model, store = fresh_model("llama"), kvlayers.PrefixStore("64MiB")
    seen: list[int] = []

    def change_once(number: int, token: int) -> bool:
        seen.append(number)
        if seen == [0, 1, 0, 0]:
            # The third prompt is read in chunks meanwhile, and two of them were read with the weights of before.
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight.mul_(2)
        return number == 1

    prompts = [[5, 6, 7, 8], [9, 10, 11], IDS[0].tolist()]
    answers = kvlayers.generate_many(
        model, prompts, prefix_store=store, max_rows=2, chunk_tokens=8, on_token=change_once, progress=False, **HOW
    )
    assert [answer.error for answer in answers] == [None] * 3
    assert seen.index(2) > 3
    right = model.generate(IDS, attention_mask=torch.ones_like(IDS), **HOW)[0, 40:].tolist()
    assert generate(model, IDS, store) == right
    assert store.statistics.hits == 0
