"""generate() from embeddings instead of ids, behind tokens that a cache has seen."""

import pytest
import torch

import families
import kvlayers
import versions
from kvlayers.upstream import compat
from models import given, prompt, tiny_model


@pytest.mark.parametrize("seen", [5, 10])
def test_embeddings_of_new_tokens_alone_are_refused_with_what_to_pass_instead(seen: int) -> None:
    """transformers would take the last of them for the new ones, and generate other tokens."""
    model, ids = tiny_model("llama"), prompt(1, 16)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)[:, 16:]
    embeddings = model.get_input_embeddings()(ids)
    mask = torch.ones_like(ids)

    def started() -> kvlayers.DynamicCache:
        cache = kvlayers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :seen], past_key_values=cache)
        return cache

    def generated(cache: kvlayers.DynamicCache, embeds: torch.Tensor) -> torch.Tensor:
        how = {"attention_mask": mask, "past_key_values": cache, "max_new_tokens": 5, "do_sample": False}
        return model.generate(inputs_embeds=embeds, **how)

    with kvlayers.installed():
        cache = started()
        new = 16 - seen
        with pytest.raises(
            kvlayers.errors.StateMismatchError, match=rf"inputs_embeds.*seen {seen} .*{new} of its 16.*all tokens"
        ):
            generated(cache, embeddings[:, seen:])
        # What the message says: embeddings of all, of which those of seen tokens are not read.
        unread = torch.cat([torch.full_like(embeddings[:, :seen], torch.nan), embeddings[:, seen:]], dim=1)
        assert torch.equal(generated(cache, unread), expected)
    if compat.PREFILL_SUBTRACTS_LENGTHS and seen > new:
        # Without install() only the numbers of tokens are known.
        with pytest.raises(kvlayers.errors.StateMismatchError, match="with the new tokens at its end"):
            generated(started(), embeddings[:, seen:])


@versions.kvlayers_recurrent_layers
def test_embeddings_of_all_tokens_are_read_once_by_recurrent_states_too() -> None:
    """transformers does not ask a cache of recurrent states alone what it has seen."""
    model, ids = families.model_of("mamba2"), prompt(2, 12)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    how |= {"return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **how)
    embeddings = model.get_input_embeddings()(ids)
    for given_ids, embeds in ((None, embeddings), (ids, embeddings), (None, embeddings[:, 7:])):
        cache = kvlayers.DynamicCache(config=model.config)
        with kvlayers.installed(), torch.no_grad():
            model(ids[:, :7], **given(cache, model))
            seen = model.generate(given_ids, inputs_embeds=embeds, past_key_values=cache, **how)
        torch.testing.assert_close(torch.stack(seen.logits), torch.stack(expected.logits), rtol=0, atol=1e-5)
        assert cache.get_seq_length() == 16


@versions.prefills_apart
def test_embeddings_are_read_whole_whatever_the_chunks() -> None:
    """transformers would pass all of them with the positions of a part, which torch refuses."""
    model, ids = tiny_model("llama"), prompt(1, 16)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    embeddings = model.get_input_embeddings()(ids)
    with kvlayers.installed():
        for beside in ({}, {"input_ids": ids}):
            seen = model.generate(
                inputs_embeds=embeddings, prefill_chunk_size=5, max_new_tokens=5, do_sample=False, **beside
            )
            assert torch.equal(seen[:, -5:], expected[:, -5:])
