"""Recurrent states go back to checkpoints: what is decoded then is what a run that never went further decodes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import counted_graphs
import kvlayers
import versions
from families import model_and_inputs
from kvlayers.upstream import cache_argument, model_types
from matrix import once, some
from models import CONFIGS, fresh_model, prompt
from versions import RECURRENT_FAMILIES

CACHES: dict[str, Callable[..., kvlayers.Cache]] = {
    "dynamic": lambda config, **options: kvlayers.DynamicCache(config=config, **options),
    "static": lambda config, **options: kvlayers.StaticCache(config, max_cache_len=64, **options),
    "quantized": lambda config, **options: kvlayers.QuantizedCache(config=config, residual_length=64, **options),
}
FEW = [family for family in RECURRENT_FAMILIES if family in ("mamba", "jamba", "qwen3_next", "lfm2")]
"""Recurrent states alone, beside attention in other layers, of a gated delta rule, and convolutions alone."""

PROMPT, DECODED = 10, 9
TOLERANCE = {"bamba": 2e-3, "mamba": 5e-5}
"""How far one forward pass is from several, with any cache: bamba clips its time steps over several tokens, and not
over one; the random mamba has logits of about 6, so that 1e-5 is the last bit but a few."""


@functools.cache
def model_of(family: str) -> Any:
    """A model of a family, which no test changes."""
    return fresh_model(family) if family in CONFIGS else model_and_inputs(family)[0]


class Decoder:
    """A model and a loop of one's own around it.

    Several tokens go one by one to a model whose scan over them begins from zero.
    """

    def __init__(self, family: str) -> None:
        self.model = model_of(family)
        self.config = self.model.config
        self.name = cache_argument.name_for(self.model)
        self.one_by_one = model_types.tokens_at_once(self.config) is not None

    def begun(self, ids: torch.Tensor, rejected: int = 0) -> kvlayers.DynamicCache:
        """A cache that has seen the first `PROMPT` tokens at once, and so many others one by one."""
        cache = kvlayers.DynamicCache(config=self.config)
        self.pass_at_once(cache, ids[:, :PROMPT])
        if rejected:
            self.decode(cache, prompt(ids.shape[0], rejected, seed=5))
        return cache

    @torch.no_grad()
    def pass_at_once(self, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(ids, **{self.name: cache}, use_cache=True).logits
        return logits

    def pass_on(self, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        return self.decode(cache, ids) if self.one_by_one and cache.get_seq_length() else self.pass_at_once(cache, ids)

    def decode(self, cache: Any, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.pass_at_once(cache, token) for token in ids.split(1, dim=1)], dim=1)


@pytest.mark.parametrize(("family", "kind"), once(RECURRENT_FAMILIES, CACHES))
def test_after_a_rollback_and_a_replay_logits_are_those_of_a_fresh_run(family: str, kind: str) -> None:
    decoder, ids = Decoder(family), prompt(2, 30)
    cache, fresh = CACHES[kind](decoder.config), CACHES[kind](decoder.config)
    for started in (cache, fresh):
        decoder.pass_on(started, ids[:, :PROMPT])
    decoder.decode(cache, prompt(2, DECODED, seed=5))
    length = PROMPT + 5
    assert cache.truncate(length) == 5
    assert cache.get_seq_length() == PROMPT
    replayed, following = ids[:, PROMPT:length], ids[:, length : length + 4]
    for logits, tokens in ((decoder.pass_on, replayed), (decoder.decode, following)):
        torch.testing.assert_close(logits(cache, tokens), logits(fresh, tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", some(RECURRENT_FAMILIES, FEW))
def test_a_crop_is_exact_or_an_error_that_says_what_to_do(family: str) -> None:
    decoder, ids = Decoder(family), prompt(2, 20)
    cache, other = decoder.begun(ids, rejected=5), decoder.begun(ids, rejected=5)
    for removed in (1, 3):
        with pytest.raises(kvlayers.errors.RollbackError, match=r"latest one before is at 10: use truncate\(\)"):
            cache.crop(-removed)
    with pytest.raises(kvlayers.errors.RollbackError, match="from 0 to the 15 tokens"):
        cache.truncate(16)
    assert torch.equal(decoder.pass_at_once(cache, ids[:, 15:16]), decoder.pass_at_once(other, ids[:, 15:16]))
    cache.crop(PROMPT)
    assert cache.get_seq_length() == PROMPT


@pytest.mark.parametrize("family", [f for f in RECURRENT_FAMILIES if f in ("mamba", "jamba", "falcon_mamba")])
def test_several_tokens_are_refused_where_the_scan_would_forget_those_before(family: str) -> None:
    decoder, ids = Decoder(family), prompt(2, 20)
    cache = decoder.begun(ids)
    with pytest.raises(kvlayers.errors.UnsupportedLayerError, match="at most 1 token, since"):
        decoder.pass_at_once(cache, ids[:, PROMPT:])
    assert cache.truncate(PROMPT) == 0
    expected = decoder.model(ids).logits[:, PROMPT:]
    torch.testing.assert_close(
        decoder.pass_on(cache, ids[:, PROMPT:]), expected, rtol=0, atol=TOLERANCE.get(family, 1e-5)
    )


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_models_take_several_tokens_at_once_where_the_table_says_so(family: str) -> None:
    """With transformers' own cache, which does not refuse them."""
    decoder, ids = Decoder(family), prompt(2, 20)
    cache = transformers.DynamicCache(config=decoder.config)
    decoder.pass_at_once(cache, ids[:, :PROMPT])
    off = (decoder.pass_at_once(cache, ids[:, PROMPT:]) - decoder.model(ids).logits[:, PROMPT:]).abs().max()
    assert (off > 2e-3) == decoder.one_by_one


def test_a_model_that_keeps_states_in_its_modules_is_not_rolled_back() -> None:
    decoder, ids = Decoder("recurrent_gemma"), prompt(1, 6)
    cache = kvlayers.DynamicCache(config=decoder.config)
    if not any(cache.is_linear):
        pytest.skip(f"the config of transformers {transformers.__version__} does not tell these layers from others")
    decoder.pass_at_once(cache, ids)
    for roll_back in (cache.truncate, cache.crop):
        with pytest.raises(kvlayers.errors.RollbackError, match="keeps its states elsewhere"):
            roll_back(4)


# Recurrent states alone, beside attention in each layer, of a gated delta rule, and convolutions alone.
@pytest.mark.slow
@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("family", some(["mamba", "falcon_h1", "qwen3_next", "lfm2"], ["falcon_h1"]))
@torch.no_grad()
def test_compiled_code_is_compiled_once_and_counts(family: str) -> None:
    decoder, ids = Decoder(family), prompt(2, 24)
    cache, other = kvlayers.StaticCache(decoder.config, max_cache_len=40), decoder.begun(ids)
    decoder.pass_on(cache, ids[:, :PROMPT])
    compiled = torch.compile(decoder.model.forward, backend=counted_graphs.backend)
    for token in ids[:, PROMPT:20].split(1, dim=1):
        seen = compiled(token, **{decoder.name: cache}, use_cache=True).logits
        torch.testing.assert_close(seen, decoder.pass_at_once(other, token), rtol=0, atol=1e-5)
    assert counted_graphs.graphs() == 1
    assert [layer.length for layer in cache.adapted_layers()] == [20] * len(cache.layers)
    for one in (cache, other):
        assert one.truncate(15) == 5
    replayed = ids[:, PROMPT:15]
    torch.testing.assert_close(decoder.pass_on(cache, replayed), decoder.pass_on(other, replayed), rtol=0, atol=1e-5)


def logits_of(model: Any, ids: torch.Tensor, **how: Any) -> torch.Tensor:
    given = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    found: torch.Tensor = model.generate(ids, **{**given, **how}).logits[0]
    return found


@pytest.mark.parametrize(
    ("family", "chunk", "padding"),
    once(["mamba", "mamba2", "falcon_mamba", "jamba", "bamba"], [3, 5, 7], [5, 0], times=2),
)
def test_padding_stays_padding_where_a_prompt_is_passed_in_pieces(family: str, chunk: int, padding: int) -> None:
    """One by one, the model does not look at the mask. transformers reads no prompt of the first three in chunks."""
    versions.need_recurrent_layers(family)
    model, ids = model_of(family), prompt(2, 14)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    with kvlayers.installed():
        pieces = logits_of(model, ids, attention_mask=mask, prefill_chunk_size=chunk)
    whole = torch.cat([logits_of(model, ids[:1]), logits_of(model, ids[1:, padding:])])
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "jamba"])
def test_padding_behind_tokens_is_refused_where_the_model_would_read_it(family: str, installed: None) -> None:
    decoder, ids = Decoder(family), prompt(1, 15)
    model, mask = decoder.model, torch.ones_like(ids)
    mask[0, 9:12] = 0
    given = {decoder.name: kvlayers.DynamicCache(config=model.config)}
    model.generate(ids[:, :8], **given, max_new_tokens=1, do_sample=False)
    seen = given[decoder.name].get_seq_length()
    with pytest.raises(kvlayers.errors.StateMismatchError, match="no padding behind"):
        logits_of(model, ids, attention_mask=mask, **given)
    assert given[decoder.name].get_seq_length() == seen
    torch.testing.assert_close(logits_of(model, ids, **given), logits_of(model, ids), rtol=1e-3, atol=1e-3)
