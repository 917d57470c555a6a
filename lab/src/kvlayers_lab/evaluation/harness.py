"""lm-evaluation-harness with any cache: importing this file registers the model `kvlayers` with the harness.

It is the harness's model `hf`, which reads through a cache that the user names.
"""

import difflib
import importlib.util
import inspect
import json
import logging
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor

try:
    import lm_eval  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"kvlayers_lab.evaluation.harness needs the package lm-eval, but importing lm_eval failed ({error}): run "
        '`pip install . "./lab[eval]"` in a checkout of kvlayers.'
    ) from error

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, handle_arg_string, make_disjoint_window
from tqdm import tqdm

from kvlayers import PrefixStore, __version__, calls, generate_many, make_cache
from kvlayers.calls import call_with_kvlayers, requested_cache
from kvlayers.errors import ConfigError, OptionError
from kvlayers.models import is_peft_model, most_positions, unwrapped
from kvlayers.options import amount_of_bytes
from kvlayers_lab.evaluation.caches import check_count, is_exact
from kvlayers_lab.evaluation.engine import score_tokens
from kvlayers_lab.evaluation.requests import ContinuationScore, ScoringRequest

Answer = tuple[float, bool]
"""Log-probability of a continuation, and whether greedy decoding would give it."""

TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""The texts of a request if it has a record of its own, and the tokens of its context and of its continuation."""

AUTO_BATCH_SIZE = 16
"""Sequences in a batch if the harness is told to find out how many: rows behind one context are short."""

RECORDED_TOGETHER, TEXTS_RECORDED_TOGETHER = 256, 16
"""Requests, and whole texts, that are scored in one call if the harness records answers (`--use_cache`).

An interrupted run loses at most so many.
"""

SPARE_TOKENS = 2
"""Tokens by which a text may be longer than its encoding, as the harness allows for."""

OPTION_SEPARATOR, VALUE_SEPARATOR = "+", ":"
"""In `nbits:2+residual_length:64`. The harness splits its model arguments at commas."""

AUTO = "auto"
"""The value of an argument that kvlayers shall choose."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@register_model("kvlayers")
class KVLayersLM(HFLM):  # type: ignore[misc]
    """The harness's model `hf`, which scores and generates through a cache of kvlayers.

    Contexts are computed once for all their continuations. Tokenization, truncation, rolling windows and chat templates
    are those of `hf`. With an exact cache, so are the scores and the texts, up to rounding of the model's dtype:
    log-probabilities are computed in float32 at least.

    Args:
        pretrained: as for `hf`: name or directory of a model, or a model.
        cache: name of the cache, one of `kvlayers.cache_names()`.
        cache_config: options of the cache, as a dict, or as text such as `"nbits:2+residual_length:64"`.
        chunk: tokens of a forward pass. Contexts are then read through the cache in pieces, so that a cache that
            rounds or evicts takes part in all of the result. Default: whole contexts in one pass, and their
            continuations token by token.
        prefix_store: bytes of memory, such as `"4GiB"`, for the states of prompts of `generate_until`: what prompts
            start with is then computed once for all of them. 0 for no store. `"auto"`: 1 GiB with an exact cache, and
            no store with other caches, as texts would depend on which prompts came before.
        arguments: the other model arguments of `hf`.

    Raises:
        RegistryError: no cache has this name.
        OptionError: an argument has a wrong value or is misspelt, or the model is tuned by prompt learning.
        ConfigError: the model has an encoder, or does not fit the cache.

    Example:
        >>> import lm_eval, kvlayers_lab.evaluation.harness
        >>> lm_eval.simple_evaluate(
        ...     model="kvlayers", model_args="pretrained=my-model,cache=int4", tasks=["hellaswag"]
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        pretrained: str | transformers.PreTrainedModel,
        cache: str = "dynamic",
        cache_config: dict[str, Any] | str | None = None,
        chunk: int | None = None,
        prefix_store: int | str | None = "auto",
        **arguments: Any,
    ) -> None:
        own = {"cache": cache, "cache_config": cache_config, "chunk": chunk, "prefix_store": prefix_store}
        self._cache, self._chunk = requested_cache(cache, parse_options(cache_config)), chunk
        if chunk is not None:
            check_count("chunk", chunk)
        self._store_bytes = _parse_store(prefix_store)
        self._is_exact = False
        self.prefix_store: PrefixStore | None = None
        check_names(arguments, own)
        check_batch_sizes(arguments)
        _check_tuning(pretrained, arguments.get("peft"), arguments.get("revision"))
        super().__init__(pretrained, **arguments)

    def _get_backend(self, config: Any, backend: str = "default", trust_remote_code: bool | None = False) -> None:
        """Choose the kind of model, and check the cache: `hf` calls it before it loads anything but the config."""
        super()._get_backend(config, backend=backend, trust_remote_code=trust_remote_code)
        if self.backend != "causal":
            raise ConfigError(
                f"the harness's model 'kvlayers' scores models without an encoder, got {config.model_type}: use 'hf'."
            )
        # With the cache named "auto", it depends on the length which cache is made.
        self._is_exact = is_exact(self._empty_cache(config, most_positions(config) or self._DEFAULT_MAX_LENGTH))
        if self._store_bytes not in (AUTO, 0) and not self._is_exact:
            raise OptionError(
                f"`prefix_store` needs an exact cache, got cache={self._cache.name!r}: leave it out, since texts would "
                "depend on which prompts came before."
            )
        if self._store_bytes and self._is_exact:
            self.prefix_store = PrefixStore() if self._store_bytes == AUTO else PrefixStore(self._store_bytes)

    def _empty_cache(self, model_or_config: object, length: int) -> transformers.Cache:
        """An empty cache for a model that reads at most `length` tokens. Raises as `kvlayers.make_cache`."""
        return make_cache(self._cache.name, model_or_config, **{"length_hint": length, **self._cache.options})

    def _create_model(self, *args: Any, **arguments: Any) -> None:
        try:
            super()._create_model(*args, **arguments)
        except TypeError as error:
            unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
            if unknown is None or unknown[1] not in arguments:
                raise
            raise OptionError(
                f"`{unknown[1]}` is no model argument of the harness, of kvlayers or of the model: remove it. Options "
                "of the cache belong in `cache_config`."
            ) from error

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """The size of a batch under `--batch_size auto`. Nothing is probed."""
        return min(AUTO_BATCH_SIZE, int(self.max_batch_size))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Answer]:
        """Score continuations of contexts, as the harness asks for them.

        Raises:
            OptionError: a continuation is empty, or longer than the model's context.
        """
        for request in requests:
            context, continuation = request.args
            if not continuation:
                raise _empty_continuation(context, continuation)
        answers: list[Answer] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, window by window. The windows of many texts are batched together."""
        totals: list[float] = []
        for part in self._parts(requests, TEXTS_RECORDED_TOGETHER):
            windows = [self._rolling_windows(*request.args) for request in part]
            answers = iter(self._loglikelihood_tokens([window for own in windows for window in own], disable_tqdm))
            for request, own in zip(part, windows, strict=True):
                totals.append(sum(next(answers)[0] for _ in own))
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, totals[-1])
        return totals

    def _parts(self, items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
        """The parts after which answers are recorded, each of `size` items: all in one if nothing is recorded."""
        step = size if self.cache_hook.dbdict is not None else max(len(items), 1)
        return (items[start : start + step] for start in range(0, len(items), step))

    def _rolling_windows(self, text: str) -> list[TokenRequest]:
        windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1)
        return [(None, *make_disjoint_window(window)) for window in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        most = self.max_length
        to_score = [self._scoring_request(*request, most) for request in requests]
        too_long = sum(len(made.context) < len(asked[1]) for made, asked in zip(to_score, requests, strict=True))
        if too_long:
            logger.warning("%d of %d contexts lost their first tokens: at most %d fit.", too_long, len(requests), most)
        answers: dict[int, Answer] = {}
        # Neighbours share as much as they can, also if they are scored in several calls.
        order = sorted(range(len(to_score)), key=to_score.__getitem__)
        disable = disable_tqdm or self.rank != 0
        with tqdm(total=len(order), disable=disable, desc="Running loglikelihood requests") as bar:
            for part in self._parts(order, RECORDED_TOGETHER):
                scores = self._score([to_score[index] for index in part], bar.update)
                for index, score in zip(part, scores, strict=True):
                    answers[index] = (score.logprob, score.is_greedy)
                    texts = requests[index][0]
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answers[index])
        return [answers[index] for index in range(len(order))]

    def _scoring_request(
        self, texts: tuple[str, str] | None, context: list[int], continuation: list[int], most: int
    ) -> ScoringRequest:
        """A request of which the model sees at most `most` tokens: a context loses tokens on the left, as in `hf`."""
        if not continuation:
            raise _empty_continuation(*(texts or ("", "")))
        if not context:
            raise OptionError(
                f"a context must be empty or have a token of its own, got {(texts or ('', ''))[0]!r}, of which the "
                "tokenizer leaves none: give the task a context with text."
            )
        if len(continuation) > most:
            raise OptionError(
                f"a continuation must have at most the {most} tokens of the model's context, got {len(continuation)}: "
                "score it with loglikelihood_rolling."
            )
        # The last token is predicted, and not read.
        return ScoringRequest(tuple(context[-(most + 1 - len(continuation)) :]), tuple(continuation))

    def _score(self, requests: list[ScoringRequest], on_scored: Any) -> list[ContinuationScore]:
        longest = max(len(context) + len(continuation) for context, continuation in requests)
        # PEFT's own tuners are modules within the model of transformers.
        model = unwrapped(self.model)
        dtype = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            return score_tokens(
                model,
                requests,
                lambda: self._empty_cache(model, longest),
                store=None,
                batch_size=self._rows,
                chunk=self._chunk,
                on_scored=on_scored,
            )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate texts, as the harness asks for them. As many rows as a batch has join as others leave."""
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(json.dumps(request.args[1], sort_keys=True, default=repr), []).append(index)
        texts: dict[int, str] = {}
        with tqdm(
            total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running generate_until requests"
        ) as bar:
            for indices in by_options.values():
                for index, text in self._generated([requests[index] for index in indices]):
                    texts[indices[index]] = text
                    self.cache_hook.add_partial("generate_until", requests[indices[index]].args, text)
                    bar.update()
        return [texts[index] for index in range(len(requests))]

    def _generated(self, requests: Sequence[Any]) -> Iterator[tuple[int, str]]:
        """The texts of requests with the same options, each with the number of its request."""
        options = normalize_gen_kwargs(requests[0].args[1], self.max_gen_toks)
        until = handle_stop_sequences(
            options.pop("until"), eos=self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        )
        if not options["do_sample"]:
            options.pop("temperature", None)
        most = options.pop("max_gen_toks")
        if most >= self.max_length:
            raise OptionError(f"`max_gen_toks` must leave room for a prompt in {self.max_length} tokens, got {most}.")
        # Those that take most memory come first.
        prompts = [self._encoded(request.args[0], self.max_length - most) for request in requests]
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        ends = _Ends(self.tokenizer, until)
        try:
            answers = generate_many(
                self.model,
                [prompts[index] for index in order],
                tokenizer=self.tokenizer,
                max_new_tokens=most,
                max_rows=self._rows,
                cache=self._cache.name,
                cache_config=self._cache.options,
                prefix_store=self.prefix_store,
                chunk_tokens=self._chunk or self.max_length,
                on_token=ends,
                progress=False,
                pad_token_id=self.tokenizer.pad_token_id,
                **{"prefill_chunk_size": self._chunk, **options},
            )
        except OptionError as error:
            # Beams, for example.
            logger.info("generate() answers these requests, as rows cannot: %s", error)
            # Padding would be rounded, or evicted.
            size = len(requests) if self._is_exact else 1
            for start in range(0, len(requests), size):
                own = super().generate_until(requests[start : start + size], disable_tqdm=True)
                yield from enumerate(own, start)
            return
        dtype = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            for answer in answers:
                if answer.error is not None:
                    raise answer.error
                yield order[answer.index], self._text(answer.ids.tolist(), until)

    @property
    def _rows(self) -> int:
        return self._detect_batch_size() if self.batch_size == "auto" else int(self.batch_size)

    def _encoded(self, context: str, most: int) -> Tensor:
        ids, _ = self.tok_batch_encode([context], left_truncate_len=most, truncation=self.truncation)
        return torch.as_tensor(ids[0])

    def _text(self, ids: list[int], until: list[str]) -> str:
        """The text of an answer, without what it thought before, up to the first text that ends it."""
        end_of_thought = self.think_end_token
        if isinstance(end_of_thought, int):
            if end_of_thought in ids:
                ids = ids[len(ids) - ids[::-1].index(end_of_thought) :]
            return str(postprocess_generated_text(self.tok_decode(ids).lstrip(), until, None))
        return str(postprocess_generated_text(self.tok_decode(ids), until, end_of_thought))

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **arguments: Any) -> Tensor:
        # Without options of its own, the cache has none, whatever a saved generation config says.
        arguments |= {"cache_config": None, **self._cache.generate_options}
        if self._chunk is not None:
            arguments["prefill_chunk_size"] = self._chunk
        store = calls.optional_store(self.prefix_store, "")
        with calls.CURRENT.override(store), call_with_kvlayers():
            return torch.as_tensor(super()._model_generate(context, max_length=max_length, stop=stop, **arguments))

    def get_model_info(self) -> dict[str, Any]:
        """What the results say about the model: also its cache, how it was read through it, and kvlayers' version."""
        return {
            **super().get_model_info(),
            "kvlayers_version": __version__,
            "cache": self._cache.name,
            "cache_config": dict(self._cache.options),
            "chunk": self._chunk,
            "prefix_store": self._store_bytes,
        }


class _Ends:
    """Whether an answer has one of the texts that end it in its newest tokens. Called with each token.

    Args:
        tokenizer: the tokenizer of the model.
        until: the texts.
    """

    def __init__(self, tokenizer: Any, until: Sequence[str]) -> None:
        self._tokenizer, self._until = tokenizer, until
        # The same text may be of some more tokens.
        own = [len(tokenizer.encode(text, add_special_tokens=False)) for text in until]
        self._most = max(own, default=0) + SPARE_TOKENS
        self._newest: dict[int, deque[int]] = {}

    def __call__(self, index: int, token: int) -> bool:
        newest = self._newest.setdefault(index, deque(maxlen=self._most))
        newest.append(token)
        text = self._tokenizer.decode(list(newest))
        return any(end in text for end in self._until)


def _empty_continuation(context: str, continuation: str) -> OptionError:
    return OptionError(
        f"a continuation must have at least one token, got {continuation!r} behind a context that ends with "
        f"{context[-40:]!r}: give the task a choice with text of its own."
    )


def _check_tuning(pretrained: Any, adapter: str | None, revision: str | None) -> None:
    """Raise `OptionError` if a model is tuned by prompt learning, which puts virtual tokens before each prompt."""
    configs: list[Any] = []
    if adapter is not None:
        if importlib.util.find_spec("peft") is None:
            raise OptionError(f"`peft` needs the package peft, got peft={adapter!r}: run `pip install peft`.")
        from peft import PeftConfig

        configs = [PeftConfig.from_pretrained(adapter, revision=revision)]
    elif is_peft_model(pretrained):
        configs = list(pretrained.peft_config.values())
    for config in configs:
        if config.is_prompt_learning:
            raise OptionError(
                f"the harness's model 'kvlayers' cannot score models with virtual tokens, got {config.peft_type}: use "
                "'hf'."
            )


def _parse_store(given: object) -> int | str:
    if given is None or given == AUTO:
        return 0 if given is None else AUTO
    if not isinstance(given, int | str) or isinstance(given, bool):
        raise OptionError(f"`prefix_store` must be a number of bytes, such as 1GiB, or 'auto', got {given!r}.")
    nbytes = amount_of_bytes(given, "prefix_store")
    if nbytes < 0:
        raise OptionError(f"`prefix_store` must not be negative, got {given!r}: pass 0 for no store.")
    return nbytes


def parse_options(given: object) -> dict[str, Any]:
    """The options of a cache: a mapping, or text such as `nbits:2+residual_length:64`.

    Raises:
        OptionError: it has another form.

    Example:
        >>> parse_options("nbits:2+backend:hqq"), parse_options({"nbits": 2}), parse_options(None)
        ({'nbits': 2, 'backend': 'hqq'}, {'nbits': 2}, {})
    """
    if given is None:
        return {}
    if isinstance(given, str):
        parts = [part.partition(VALUE_SEPARATOR) for part in given.split(OPTION_SEPARATOR)]
        if all(name.strip().isidentifier() and separator for name, separator, _ in parts):
            return {name.strip(): handle_arg_string(value.strip()) for name, _, value in parts}
    elif isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return dict(given)
    raise OptionError(
        f"`cache_config` must be options of the cache, got {given!r}: write nbits:2+residual_length:64, or pass a dict."
    )


def check_batch_sizes(given: Mapping[str, Any]) -> None:
    """Raise `OptionError` unless `batch_size` and `max_batch_size`, if given, are numbers of sequences or "auto"."""
    for name in ("batch_size", "max_batch_size"):
        size = str(given.get(name, 1))
        if not size.startswith(AUTO) and not (size.isdecimal() and int(size) > 0):
            raise OptionError(f"`{name}` must be a whole number, at least 1, or 'auto', got {given[name]!r}.")


def check_names(names: Iterable[str], own: Iterable[str]) -> None:
    """Raise `OptionError` if an argument for transformers is nearly one of the harness or of kvlayers.

    transformers refuses all other names that it does not know.

    Args:
        names: the arguments that are passed on to transformers.
        own: the arguments of kvlayers.
    """
    known = [*own, *inspect.signature(HFLM).parameters]
    of_transformers = inspect.signature(transformers.PreTrainedModel.from_pretrained).parameters
    for name in set(names) - {*known, *of_transformers}:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near:
            raise OptionError(
                f"`{name}` is not a model argument: did you mean {near[0]!r}? kvlayers adds {', '.join(own)} to the "
                "arguments of the model 'hf'."
            )
