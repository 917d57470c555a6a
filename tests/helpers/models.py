"""Tiny random models of the families that the tests generate with."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import transformers as tf

import kvlayers
import versions
from kvlayers import DynamicCache, Rows
from kvlayers.upstream import cache_argument

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": versions.NO_END,
}
WINDOW = 8

CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**COMMON),
    "qwen2": lambda: tf.Qwen2Config(**COMMON),
    "qwen3": lambda: tf.Qwen3Config(**COMMON),
    "mistral": lambda: tf.MistralConfig(**COMMON, sliding_window=WINDOW),
    "gemma2": lambda: tf.Gemma2Config(**COMMON, sliding_window=WINDOW, query_pre_attn_scalar=8),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=8,
    ),
    "llama4": lambda: tf.Llama4TextConfig(
        **{**COMMON, "num_hidden_layers": 4},
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=48,
        num_local_experts=2,
        num_experts_per_tok=1,
        no_rope_layers=[1, 1, 1, 0],
    ),
    "gpt2": lambda: tf.GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=1,
        eos_token_id=versions.NO_END,
        pad_token_id=0,
    ),
    "deepseek_v3": lambda: tf.DeepseekV3Config(
        **{k: v for k, v in COMMON.items() if k != "head_dim"} | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "mamba": lambda: tf.MambaConfig(
        vocab_size=97,
        hidden_size=32,
        state_size=4,
        num_hidden_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=versions.NO_END,
    ),
    "jamba": lambda: tf.JambaConfig(
        **{k: v for k, v in COMMON.items() if k != "head_dim"} | {"num_hidden_layers": 4},
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    "t5": lambda: tf.T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=versions.NO_END,
        decoder_start_token_id=0,
    ),
    "bart": lambda: tf.BartConfig(
        vocab_size=97,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=versions.NO_END,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    ),
}
ENCODER_DECODERS = ("t5", "bart")
RECURRENT = ("mamba", "jamba")
ATTENDING = tuple(name for name in CONFIGS if name not in (*ENCODER_DECODERS, *RECURRENT))


def tiny_model(family: str, seed: int = 0) -> Any:
    """A random model of a family, the same in every test."""
    model = _shared_model(family, seed)
    # transformers' exporters leave the method that they put back on the instance, and stores refuse such a model.
    vars(model).pop("forward", None)
    return model


@functools.cache
def _shared_model(family: str, seed: int) -> Any:
    return fresh_model(family, seed)


def fresh_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of a family that nobody else has, with some fields of its config changed."""
    versions.need_recurrent_layers(family)
    config = CONFIGS[family]()
    config.update(changes)
    torch.manual_seed(seed)
    auto = tf.AutoModelForSeq2SeqLM if family in ENCODER_DECODERS else tf.AutoModelForCausalLM
    return with_larger_weights(auto.from_config(config).eval())


def with_larger_weights(model: Any) -> Any:
    """A model with larger weights: random ones of the usual size give logits so close that a token says nothing."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "norm" not in name:
                weight.mul_(3)
    return model


def bare(model: Any) -> Any:
    """The same model, with forward passes without what transformers wraps around them: for code that is compiled.

    TorchDynamo traces the wrappers for each graph, and takes a third of its time for them.
    """
    for module in (model, model.model):
        module.forward = types.MethodType(inspect.unwrap(type(module).forward), module)
    return model


def without_mlps(model: Any) -> Any:
    """The same model, whose layers attend and do nothing else: for code that is compiled.

    TorchDynamo takes a quarter of its time for what has nothing to do with a cache.
    """
    for layer in model.model.layers:
        layer.mlp = torch.nn.Identity()
    return model


def given(cache: Any, model: Any = None) -> dict[str, Any]:
    """A cache as the argument of a forward pass, by the name that this model takes it by, or most models do."""
    return {cache_argument.usual_name() if model is None else cache_argument.name_for(model): cache}


@torch.no_grad()
def read(model: Any, ids: torch.Tensor, cache: Any = None, **arguments: Any) -> tuple[Any, torch.Tensor]:
    """A cache, an empty one by default, that has seen these tokens now, and their logits."""
    cache = DynamicCache() if cache is None else cache
    logits: torch.Tensor = model(ids, **given(cache, model), **arguments).logits
    return cache, logits


@torch.no_grad()
def row_logits(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of new tokens `[rows, new]` behind a cache whose rows have lengths of their own."""
    rows, new = Rows(cache), ids.shape[1]
    attends = any(layer.traits.attends for layer in cache.layers)
    positions = {"position_ids": rows.position_ids(new)} if attends else {}
    logits: torch.Tensor = model(
        ids, attention_mask=rows.attention_mask(new), **positions, **given(cache, model)
    ).logits
    return logits


def prompt(batch: int = 1, tokens: int = 12, seed: int = 0) -> torch.Tensor:
    """Random token ids, int64 `[batch, tokens]`, without special ones."""
    return torch.randint(3, 97, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def continued(model: Any, ids: torch.Tensor, tokens: int = 8, **how: Any) -> Any:
    """What `generate()` returns of these ids, without padding and greedy unless it is told otherwise."""
    return model.generate(
        ids, **{"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False, **how}
    )


def under_install(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What a function returns while kvlayers is installed: a bound method would be the one from before."""
    with kvlayers.installed():
        return call(*args, **options)


@contextmanager
def _passes(model: Any, of_ids: Callable[[torch.Tensor], Any]) -> Iterator[list[Any]]:
    seen: list[Any] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(of_ids(kwargs["input_ids"] if "input_ids" in kwargs else args[0]))

    with model.register_forward_pre_hook(note, with_kwargs=True):
        yield seen


def tokens_passed(model: Any) -> AbstractContextManager[list[int]]:
    """Tokens of each forward pass of a model: rows times columns."""
    return _passes(model, torch.Tensor.numel)


def passes_of(model: Any) -> AbstractContextManager[list[tuple[int, int]]]:
    """Rows and tokens of each forward pass of a model."""
    return _passes(model, lambda ids: tuple(ids.shape))
