"""Embeddings of all tokens in calls of generate(), where transformers would read some of them twice."""

import torch

import families
import kvlayers
import versions
from models import given, prompt, tiny_model


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
