"""Chats with tiny models: a tokenizer of single characters, templates, and what a model answers without a cache."""

import string
from typing import Any

import tokenizers
import torch
import transformers

LETTERS = string.ascii_letters + string.digits + " .,:!?'\n"
SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As of many models: a system prompt of its own, once at the beginning."""

TRIMMED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}:{{ message['content'] | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
"""As of Llama 3: texts without spaces around them."""

FORGETFUL = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{{ message['content'][-4:] }}{% else %}{{ message['content'] }}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if think %}hm\n{% endif %}{% endif %}"
)
"""As of models that reason: earlier answers are shortened, so turns do not begin with what was generated."""

TEMPLATES = {"chatml": CHATML, "trimmed": TRIMMED, "forgetful": FORGETFUL}


def tokenizer_with(template: str) -> Any:
    """A tokenizer of single characters with a chat template."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *LETTERS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )
    found.chat_template = template
    return found


def greedy(tokens: int = 9) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "do_sample": False}


def answer_without_cache(
    model: Any, tokenizer: Any, messages: list[dict[str, str]], tokens: int = 9, **template: Any
) -> str:
    """What a model answers that reads the whole conversation in each step."""
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **template
    ).input_ids
    output = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=False, **greedy(tokens))
    text: str = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return text
