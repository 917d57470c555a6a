"""Models that keep states outside of the cache, or states that cannot be rolled back, are left alone there; so is what
models of images remember of other calls."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import kvlayers
import kvlayers_lab
import versions
from every_causal_model import model_of
from families import FAMILIES, any_model_and_inputs
from kvlayers.errors import ConfigError, OptionError, RollbackError, StateMismatchError, UnsupportedLayerError
from kvlayers.interop.adapter import TransformersLayer
from kvlayers.upstream import cache_argument
from kvlayers.upstream.model_types import kept_states
from models import continued, prompt, read
from vision_models import inputs, seeing_model


@pytest.mark.parametrize("family", FAMILIES)
def test_states_in_modules_are_found_before_and_after_a_pass(family: str) -> None:
    model, inputs = any_model_and_inputs(family)
    before = kept_states(model)
    model.generate(**inputs, max_new_tokens=2)
    keeps = family == "recurrent_gemma"
    assert [before is not None, kept_states(model) is not None] == [keeps, keeps]


class Remembering(nn.Module):
    """Assigns an attribute in a method that its pass uses, as models outside of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.ones(1)), None
        self.moved = nn.Buffer(torch.ones(1))

    def forward(self, states: Tensor) -> Tensor:
        # This is no state of a sequence: a buffer on another device.
        self.moved = self.moved.to(states.device)
        return self._mixed(states) * self.scale * self.moved

    def _mixed(self, states: Tensor) -> Tensor:
        mixed = states if self.last is None else states + self.last
        self.last = states
        return mixed


class Inheriting(Remembering):
    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states) + 1


@pytest.mark.parametrize(
    ("module", "found"),
    [(Remembering(), "1.last"), (Inheriting(), "1.last"), (nn.LSTM(2, 2), None)],
    ids=["assigned", "assigned by its base", "none"],
)
def test_states_of_any_module_are_found(module: nn.Module, found: str | None) -> None:
    assert kept_states(nn.Sequential(nn.Linear(2, 2), module)) == found


@torch.no_grad()
def by_full_passes(model: Any, ids: Tensor, tokens: int = 6) -> list[int]:
    """Greedy answer by one full pass for each token, without a cache."""
    for _ in range(tokens):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, -tokens:].tolist()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("chunk", [4, 512])
def test_many_prompts_of_a_model_that_keeps_states_in_its_modules(rows: int, chunk: int) -> None:
    """Chunks of a prompt each began from zero, and rows had the states of one of them."""
    model = model_of("recurrent_gemma")
    prompts = [prompt(1, tokens, tokens) for tokens in (14, 9, 20, 11)]
    if not cache_argument.is_taken_by(model):
        # Until 5.0 it kept all of its states in its modules.
        with pytest.raises(OptionError, match="must take `position_ids` and a cache"):
            kvlayers.generate_many(model, prompts)
        return
    answers = kvlayers.generate_many(
        model, prompts, max_new_tokens=6, max_rows=rows, chunk_tokens=chunk, in_order=True, progress=False,
        do_sample=False, eos_token_id=None,
    )  # fmt: skip
    assert [answer.ids.tolist() for answer in answers] == [by_full_passes(model, ids) for ids in prompts]
    with pytest.raises(OptionError, match="cannot be taken back"):
        kvlayers.generate_many(model, prompts, prompt_lookup_num_tokens=2)


def test_a_prompt_in_chunks_is_read_whole_if_states_are_in_modules(installed: None) -> None:
    model, ids = model_of("recurrent_gemma"), prompt(1, 20)
    found = continued(model, ids, 6, prefill_chunk_size=7, eos_token_id=None)
    assert found[0, 20:].tolist() == by_full_passes(model, ids)


def test_a_filled_cache_of_a_model_that_keeps_states_in_its_modules_is_refused(installed: None) -> None:
    model, ids = model_of("recurrent_gemma"), prompt(1, 12)
    versions.need_cache(model)
    cache = kvlayers.DynamicCache(config=model.config)
    longer = torch.cat([continued(model, ids, 4, past_key_values=cache), ids], dim=1)
    seen = cache.get_seq_length()
    with pytest.raises(StateMismatchError, match="conv1d_state"):
        continued(model, longer, 4, past_key_values=cache)
    assert cache.get_seq_length() == seen
    cache.reset()
    found = continued(model, longer, 6, past_key_values=cache, eos_token_id=None)
    assert found[0, -6:].tolist() == by_full_passes(model, longer)


def remembering() -> Any:
    """A model that keeps states although its class says nothing of them."""
    model = model_of("llama")
    model.model.norm = nn.Sequential(model.model.norm, Remembering())
    assert not model._is_stateful
    return model


DRAFTS = "`assistant_model` must keep its states in its cache, to roll drafts back, got a R.*conv1d_state"
REFUSED: dict[str, tuple[Callable[[Any, Any], object], type[Exception], str]] = {
    "drafts that are looked up": (
        lambda model, keeps: continued(remembering(), prompt(), prompt_lookup_num_tokens=2),
        RollbackError,
        "1.last",
    ),
    # Its cache was rolled back, and an interrupted pass was blamed.
    "drafts by it": (lambda model, keeps: continued(model, prompt(), assistant_model=keeps), RollbackError, DRAFTS),
    "drafts by it of two prompts": (
        lambda model, keeps: continued(model, prompt(2), assistant_model=keeps),
        RollbackError,
        DRAFTS,
    ),
    "drafts by it of rows": (
        lambda model, keeps: kvlayers.generate_many(model, [prompt()], assistant_model=keeps),
        OptionError,
        DRAFTS,
    ),
    "documents": (
        lambda model, keeps: kvlayers.generate(
            keeps, documents=[prompt(), prompt(1, 9)], question=prompt(1, 4), recompute=0, max_new_tokens=2
        ),
        OptionError,
        "conv1d_state|takes no cache",
    ),
    "scores": (
        lambda model, keeps: kvlayers_lab.score(keeps, [prompt()[0].tolist()], [[[3, 4]]]),
        ConfigError,
        "keep all of its states|must take a cache",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_states_in_modules_cannot_do_is_refused(what: str, installed: None) -> None:
    call, error, said = REFUSED[what]
    models = [model_of(model_type) for model_type in ("llama", "recurrent_gemma")]
    with pytest.raises(error, match=said):
        call(*models)


def test_a_cache_without_the_states_of_its_model_is_not_copied() -> None:
    model = model_of("recurrent_gemma")
    cache = kvlayers.DynamicCache(config=model.config)
    if not any(cache.is_linear):
        pytest.skip(f"the config of transformers {transformers.__version__} does not tell these layers from others")
    cache.fork()
    read(model, prompt(1, 6), cache)
    for copy in (cache.fork, cache.state):
        with pytest.raises(UnsupportedLayerError, match="keeps them elsewhere"):
            copy()
    assert cache.get_seq_length() == 6


class WithMeans(transformers.cache_utils.DynamicLayer):
    """Adds a state, and inherits `crop`."""

    def __init__(self) -> None:
        super().__init__()
        self.means: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.means = key_states.mean(dim=-2)
        return super().update(key_states, value_states, *args, **kwargs)


class WithMeansAndCrop(WithMeans):
    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)


class Named(transformers.cache_utils.DynamicLayer):
    """Adds no state."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "named"


def filled(layer_class: type) -> TransformersLayer:
    layer = TransformersLayer(layer_class())
    layer.update(torch.ones(1, 2, 5, 4), torch.ones(1, 2, 5, 4))
    return layer


@pytest.mark.parametrize(("layer_class", "left"), [(WithMeansAndCrop, 3), (Named, 3), (WithMeans, 5)])
def test_a_layer_is_cropped_if_its_crop_knows_its_states(layer_class: type, left: int) -> None:
    layer = filled(layer_class)
    assert layer.is_croppable is (left == 3)
    refused = pytest.raises(RollbackError, match="WithMeans .* states beside its keys and values")
    with refused if left == 5 else contextlib.nullcontext():
        layer.truncate(3)
    assert layer.length == left


def test_a_model_that_takes_one_token_at_a_time_behind_others() -> None:
    """A second turn is passed one by one, and a store is not used, since its states depend on that."""
    versions.need_since("5.1", "tokens of prophetnet one by one")
    model, ids = model_of("prophetnet"), prompt()
    store, cache = kvlayers.PrefixStore(2**24), kvlayers.DynamicCache(config=model.config)
    with kvlayers.installed(prefix_store=store):
        for _ in range(2):
            assert torch.equal(continued(model, ids, 4), continued(model, ids, 4, cache_implementation="dynamic"))
    assert store.statistics.bypassed == 4
    with kvlayers.installed():
        longer = torch.cat([continued(model, ids, 4, past_key_values=cache), prompt(1, 5, seed=2)], dim=1)
        found = continued(model, longer, 4, past_key_values=cache)
    own, logits = read(model, ids, transformers.DynamicCache(config=model.config))
    for place, token in enumerate(found[:, 12:].split(1, dim=1), start=12):
        assert place < longer.shape[1] or int(logits[0, -1].argmax()) == int(token)
        _, logits = read(model, token, own)


def test_a_model_that_adds_tokens_to_its_cache_uses_no_store_for_several_prompts() -> None:
    versions.need_since("5.17", "several prompts of cpmant at once")
    model, store = model_of("cpmant"), kvlayers.PrefixStore(2**24)
    ids = prompt(2, 40)
    ids[1, :36] = ids[0, :36]
    expected = continued(model, ids, 4)
    with kvlayers.installed(prefix_store=store):
        assert torch.equal(continued(model, ids, 4), expected)
    assert store.statistics.bypassed == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hybrid_chunked", "static"])
def test_windows_beside_recurrent_states_are_not_compiled_with_masks_for_every_token(name: str) -> None:
    """transformers' table has the mask of full attention for them, which does not fit a window."""
    model, ids = model_of("inkling2_text"), prompt(2, 20)
    expected = continued(model, ids, 4)
    compiled = transformers.CompileConfig(backend="eager", fullgraph=False, mode=None)
    with kvlayers.installed():
        cache = kvlayers.make_cache(name, model, max_cache_len=200)
        assert torch.equal(continued(model, ids, 4, past_key_values=cache, compile_config=compiled), expected)


def test_states_that_a_layer_keeps_by_name_are_selected_once() -> None:
    """Before 5.23, `reorder_cache` of these layers left them; from then on it selects them itself."""
    model = model_of("deepseek_v4")
    cache, _ = read(model, prompt(3, 9), kvlayers.DynamicCache(config=model.config))

    def by_name() -> list[Tensor]:
        named = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, dict)]
        return [states.clone() for each in named for states in each.values() if isinstance(states, Tensor)]

    before, order = by_name(), torch.tensor([1, 2, 0])
    assert before
    cache.reorder_cache(order)
    torch.testing.assert_close(by_name(), [states[order] for states in before], rtol=0, atol=0)


# Models of images remember how far the newest ones have moved positions. A conversation goes on with its own.

SEEING = ("qwen2_5_vl", "qwen3_vl")
FIRST, SECOND = [5, 6, 7, 8, 9, 10], [11, 12, 13, 14]
HOW = {"return_dict_in_generate": True, "output_logits": True}


def look_at_an_image(model: Any) -> None:
    """A call of somebody else."""
    kvlayers.generate(model, **inputs("qwen2_5_vl", [[20, 21], (3, (8, 8)), [22, 23]]), max_new_tokens=2)


def behind(output: Any) -> Tensor:
    return torch.cat([output.sequences, torch.tensor([SECOND])], dim=1)


@pytest.mark.parametrize("only_new", [False, True], ids=["the whole sequence", "new tokens alone"])
@pytest.mark.parametrize("family", SEEING)
def test_a_call_with_a_cache_goes_on_as_without_the_other_image(family: str, only_new: bool, installed: None) -> None:
    if only_new:
        versions.need_since("5.4", "new tokens alone behind a cache")
    model, seen = seeing_model(family), []
    for meanwhile in (lambda model: None, look_at_an_image):
        cache = kvlayers.DynamicCache(config=model.config)
        whole = behind(continued(model, torch.tensor([FIRST]), 5, past_key_values=cache, **HOW))
        meanwhile(model)
        ids = whole[:, cache.get_seq_length() :] if only_new else whole
        output = continued(model, ids, 5, attention_mask=torch.ones_like(whole), past_key_values=cache, **HOW)
        seen.append(output.logits)
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(seen[1], continued(model, whole, 5, **HOW).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", SEEING)
def test_a_conversation_with_an_image_keeps_its_positions(family: str) -> None:
    model, asked = seeing_model(family), inputs(family, [[20, 21], (3, (8, 8)), [22, 23]])
    cache = kvlayers.DynamicCache(config=model.config)
    with kvlayers.installed():
        first = model.generate(**asked, past_key_values=cache, max_new_tokens=5, do_sample=False, **HOW)
        whole = behind(first)
        second = continued(model, whole, 5, past_key_values=cache, **HOW)
    again = {name: entries for name, entries in asked.items() if name not in ("input_ids", "attention_mask")}
    if "mm_token_type_ids" in asked:
        padding = 0, whole.shape[1] - asked["input_ids"].shape[1]
        again["mm_token_type_ids"] = nn.functional.pad(asked["mm_token_type_ids"], padding)
    torch.testing.assert_close(second.logits, continued(model, whole, 5, **again, **HOW).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", SEEING)
def test_rows_and_scores_have_their_own_positions(family: str) -> None:
    model, text = seeing_model(family), [*FIRST, *SECOND]

    def found() -> tuple[list[int], Any]:
        answers = kvlayers.generate_many(
            model, [text, FIRST], max_new_tokens=5, do_sample=False, chunk_tokens=4, in_order=True, progress=False
        )
        scores = kvlayers_lab.score(model, [FIRST], [[SECOND]], progress=False)
        return [answer.ids.tolist() for answer in answers], scores[0][0].token_logprobs

    right = continued(model, torch.tensor([text]), 5)[0, len(text) :].tolist()
    before = found()
    look_at_an_image(model)
    after = found()
    assert after[0] == before[0]
    assert after[0][0] == right
    assert after[1] == pytest.approx(before[1], abs=1e-5)
