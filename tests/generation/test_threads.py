"""Threads that generate with one model: tokens are those of a thread on its own, and nothing is left on the model."""

import contextlib
import copy
import importlib
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
import transformers.generation.configuration_utils as configuration
from torch import Tensor
from transformers.generation.utils import GenerationMixin

import kvlayers
from drafts import draft_of, spread
from kvlayers import DynamicLayer, PrefixStore
from kvlayers.kernels.codes import cpu_packing as pack
from kvlayers.upstream import compat
from kvlayers.utils import native_library
from matrix import some
from models import continued, fresh_model, prompt
from oracle import states
from rounds import ROUNDS
from spies import spy

THREADS = 4
FAMILIES = ("llama", "gemma3", "qwen3_next", "bamba", "falcon_h1", "t5")
NEW_TOKENS = 6
SECONDS = 300
"""For threads to meet, and to end."""


def choosing(seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Samples with a generator of its own, as torch's is that of all threads, and leaves but one token to choose."""
    generator = torch.Generator().manual_seed(seed)

    def choose(input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        return torch.full_like(scores, -float("inf")).scatter_(1, chosen, 0.0)

    return choose


def parts_of(model: Any) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
    """What is set on a model, on its modules and on their classes, and what its configs say."""
    found: dict[Any, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            parts = value.items() if isinstance(value, dict) else [("", value)]
            found.update({(path, name, part): entry for part, entry in parts})
    for base in {base for module in model.modules() for base in type(module).__mro__}:
        found.update({(base, name): value for name, value in vars(base).items()})
    return found, copy.deepcopy([vars(model.config), vars(model.generation_config)])


def check_untouched(model: Any, before: Any) -> None:
    (was, said), (now, says) = before, parts_of(model)
    assert sorted(map(str, now.keys() ^ was.keys())) == []
    assert [key for key, value in was.items() if now[key] is not value] == []
    assert says == said


def in_threads(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Call `work` with the number of each thread in all of them at once, and raise what the first of them raises."""
    barrier = threading.Barrier(threads)
    raised: list[BaseException] = []

    def run(index: int) -> None:
        try:
            barrier.wait(SECONDS)
            work(index)
        except BaseException as error:
            raised.append(error)

    crowd = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(threads)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in crowd), "a thread waits for ever"
    if raised:
        raise raised[0]


@pytest.fixture(autouse=True)
def _taking_turns_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def repetitive(seed: int = 0) -> Tensor:
    """A prompt in which look-up finds something, long enough to be computed once for several samples."""
    return torch.cat([prompt(1, 9, seed=seed)] * 4, dim=1)


def tokens_of(model: Any, ids: Tensor, **how: Any) -> Tensor:
    return continued(model, ids, NEW_TOKENS, **how)


@pytest.mark.parametrize("mode", ["prompt look-up", "assisted"])
def test_calls_that_break_off_leave_nothing_on_the_model(installed: None, mode: str) -> None:
    model, ids = spread("qwen3_next"), repetitive()
    how = {"prompt_lookup_num_tokens": 4} if mode == "prompt look-up" else {"assistant_model": draft_of(model)}
    # A method of its class is replaced until `uninstall()` by the first call.
    tokens_of(model, ids)
    untouched, before, meanwhile = parts_of(model), dict(vars(model)), set()
    expected = tokens_of(model, ids, **how)

    def watch(input_ids: Tensor, scores: Tensor) -> Tensor:
        """Notes what is set on the model that was not set on it before."""
        meanwhile.update(name for name, value in vars(model).items() if before.get(name) is not value)
        return scores

    def break_off(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > ids.shape[1] + 2:
            raise ZeroDivisionError
        return scores

    def work(index: int) -> None:
        if index % 2:
            with pytest.raises(ZeroDivisionError):
                tokens_of(model, ids, logits_processor=[break_off], **how)
        else:
            assert torch.equal(tokens_of(model, ids, logits_processor=[watch], **how), expected)

    in_threads(work)
    check_untouched(model, untouched)
    assert meanwhile == set()


Mode = Callable[[Any, Any, Tensor, PrefixStore, int], Tensor]


def by_prefixes(model: Any, draft: Any, ids: Tensor, store: PrefixStore, seed: int) -> Tensor:
    with kvlayers.installed(prefix_store=store):
        return tokens_of(model, ids)


def by_names(model: Any, draft: Any, ids: Tensor, store: PrefixStore, seed: int) -> Tensor:
    return torch.cat([tokens_of(model, ids, cache_implementation=name) for name in ("static", "int4", "offloaded")])


def by_options(options: Callable[[Any, int], dict[str, Any]]) -> Mode:
    return lambda model, draft, ids, store, seed: tokens_of(model, ids, **options(draft, seed))


MODES: dict[str, Mode] = {
    "greedy": by_options(lambda draft, seed: {}),
    "prompt look-up": by_options(lambda draft, seed: {"prompt_lookup_num_tokens": 4}),
    "sampling": by_options(lambda draft, seed: {"do_sample": True, "logits_processor": [choosing(seed)]}),
    "assisted": by_options(lambda draft, seed: {"assistant_model": draft}),
    "beams": by_options(lambda draft, seed: {"num_beams": 3}),
    "prefix store": by_prefixes,
    "samples of one prompt": by_options(
        lambda draft, seed: {"do_sample": True, "num_return_sequences": 3, "logits_processor": [choosing(seed)]}
    ),
    "static, quantized and offloaded": by_names,
}


@pytest.mark.slow
@pytest.mark.parametrize("family", some(FAMILIES, ["gemma3", "qwen3_next", "t5"]))
def test_threads_may_generate_in_every_mode_with_one_model(installed: None, family: str) -> None:
    model, prompts = spread(family), [repetitive(0), repetitive(1)]
    draft = draft_of(model)
    expected = {
        (name, which): mode(model, draft, ids, PrefixStore(2**24), which)
        for name, mode in MODES.items()
        for which, ids in enumerate(prompts)
    }
    untouched, store = [(each, parts_of(each)) for each in (model, draft)], PrefixStore(2**24)
    wrong: list[tuple[str, int]] = []
    calls: list[str] = []

    def work(index: int) -> None:
        names, which = [*MODES], index % 2
        for number in range(ROUNDS):
            # All threads are in the same mode, or half of them in another one.
            shift = number % 2 * (index // 2) * 4
            for name in names[shift:] + names[:shift]:
                if not torch.equal(MODES[name](model, draft, prompts[which], store, which), expected[name, which]):
                    wrong.append((name, index))
                calls.append(name)

    in_threads(work)
    assert wrong == []
    assert len(calls) == len(MODES) * THREADS * ROUNDS
    for each, before in untouched:
        check_untouched(each, before)


# Installing and uninstalling


def found() -> list[Any]:
    """What `install()` replaces."""
    assert "kvlayers" not in vars(transformers.GenerationConfig)
    names = ("generate", "_prepare_cache_for_generation", *(["_prefill"] if compat.PREFILLS_APART else []))
    methods = (vars(GenerationMixin)[name] for name in names)
    return [*methods, transformers.PreTrainedModel.__call__, configuration.ALL_CACHE_IMPLEMENTATIONS]


@pytest.fixture
def _leaving_transformers_as_it_was() -> Iterator[None]:
    before = found()
    yield
    assert not kvlayers.is_installed()
    assert found() == before


def type_of_cache(model: Any, **how: Any) -> type:
    return type(continued(model, prompt(), 2, return_dict_in_generate=True, **how).past_key_values)


@pytest.mark.usefixtures("_leaving_transformers_as_it_was")
def test_blocks_of_many_threads_overlap() -> None:
    model = fresh_model("llama")

    def work(index: int) -> None:
        for _ in range(8):
            with kvlayers.installed(legacy_names=bool(index % 2)):
                assert type_of_cache(model, cache_implementation="int8") is kvlayers.QuantizedCache

    in_threads(work)


@pytest.mark.usefixtures("_leaving_transformers_as_it_was")
def test_tokens_are_right_while_another_thread_installs_and_uninstalls() -> None:
    model, ids, ended = fresh_model("gemma3"), repetitive(), threading.Event()
    expected = tokens_of(model, ids)

    def work(index: int) -> None:
        if index == 0:
            while not ended.is_set():
                kvlayers.install(legacy_names=True)
                kvlayers.uninstall()
            return
        try:
            for _ in range(2):
                assert torch.equal(tokens_of(model, ids), expected)
                assert torch.equal(kvlayers.generate(model, ids, max_new_tokens=NEW_TOKENS, do_sample=False), expected)
        finally:
            if index == 1:
                ended.set()

    in_threads(work)


@pytest.mark.usefixtures("_leaving_transformers_as_it_was")
def test_a_call_ends_as_it_began_though_another_thread_uninstalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had been allowed to draft, as its cache would have been one that can go back: so it must get that cache."""
    model, ids = spread("qwen3_next"), repetitive()
    original, elsewhere = GenerationMixin._prepare_special_tokens, []

    def uninstall(index: int) -> None:
        kvlayers.uninstall()
        assert not kvlayers.is_installed()
        elsewhere.append(type_of_cache(fresh_model("llama")))

    def prepare_special_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is model and not elsewhere:
            in_threads(uninstall, 1)
        return original(self, *args, **kwargs)

    expected = tokens_of(model, ids)
    monkeypatch.setattr(GenerationMixin, "_prepare_special_tokens", prepare_special_tokens)
    kvlayers.install()
    output: Any = tokens_of(model, ids, prompt_lookup_num_tokens=4, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert type(output.past_key_values) is kvlayers.DynamicCache
    # What began after that had nothing to do with kvlayers.
    assert elsewhere == [transformers.DynamicCache]


@pytest.mark.usefixtures("_leaving_transformers_as_it_was")
def test_a_call_of_its_own_is_nothing_to_other_threads() -> None:
    model, elsewhere = fresh_model("llama"), []

    def call(input_ids: Tensor, scores: Tensor) -> Tensor:
        in_threads(lambda index: elsewhere.append(type_of_cache(model)), 1)
        return scores

    how = {"max_new_tokens": 2, "return_dict_in_generate": True, "logits_processor": [call]}
    assert type(kvlayers.generate(model, prompt(), **how).past_key_values) is kvlayers.DynamicCache
    assert elsewhere == [transformers.DynamicCache] * 2


@pytest.mark.usefixtures("_leaving_transformers_as_it_was")
def test_one_of_the_threads_that_register_a_name_gets_it() -> None:
    for _ in range(20):
        decorators = [kvlayers.register("contested") for _ in range(THREADS)]
        owners: list[int] = []

        def work(index: int, decorators: list[Any] = decorators, owners: list[int] = owners) -> None:
            with kvlayers.installed(), contextlib.suppress(kvlayers.errors.RegistryError):
                decorators[index](lambda request: kvlayers.DynamicCache())
                owners.append(index)

        in_threads(work)
        assert len(owners) == 1
        kvlayers.unregister("contested")


# What is made when it is first needed


def test_threads_that_need_a_kernel_at_once_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    asked: list[pathlib.Path] = []
    spy(monkeypatch, native_library, "Compilation", lambda source, niceness: asked.append(source))
    source = pathlib.Path(pack.__file__).with_suffix(".cpp")
    library = native_library.NativeLibrary(source, "kvlayers_pack", purpose="packing")
    in_threads(lambda index: seen.append(library.get()))
    assert asked == [source]
    assert seen == [seen[0]] * THREADS


def test_one_thread_at_a_time_imports_what_a_public_name_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    importing, original = threading.Lock(), importlib.import_module

    def import_module(name: str, package: str | None = None) -> Any:
        assert importing.acquire(blocking=False)
        time.sleep(0.01)
        importing.release()
        return original(name, package)

    monkeypatch.setattr(importlib, "import_module", import_module)
    names = ("Cache", "generate", "PrefixStore", "plan")
    in_threads(lambda index: kvlayers.__getattr__(names[index]))


def test_threads_may_fork_one_cache_at_once() -> None:
    """All forks must be told of each other before one of them writes behind what they share."""
    for _ in range(40):
        layer = DynamicLayer()
        layer.update(*states(1, 100, torch.Generator().manual_seed(0)))
        forks: dict[int, DynamicLayer] = {}

        def work(index: int, layer: DynamicLayer = layer, forks: dict[int, DynamicLayer] = forks) -> None:
            forks[index] = layer.fork()
            for _ in range(5):
                forks[index].update(torch.full((1, 2, 1, 4), float(index)), torch.full((1, 2, 1, 6), float(index)))

        in_threads(work, 2 * THREADS)
        for index, fork in forks.items():
            assert torch.equal(fork.keys[:, :, 100:], torch.full((1, 2, 5, 4), float(index)))
