"""Each benchmark runs, has the figures that its page needs, and fails where a cache attends to other states."""

import importlib
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import kvlayers
import versions
from kvlayers.eviction import eviction_rule
from kvlayers.eviction.selection import HEAD_FLOOR, select
from models import fresh_model

pytestmark = [pytest.mark.slow, versions.benchmarks_of_transformers]


class OtherValues(kvlayers.DynamicCache):
    """Returns values of the opposite sign, as no cache should."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys, -values


class OtherStaticValues(kvlayers.StaticCache):
    """The same of a reservation."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys, -values


class OtherKeys(kvlayers.DynamicCache):
    """Returns the keys of other tokens."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return keys.flip(2), values


@dataclass(frozen=True)
class Script:
    """A run of a benchmark that takes seconds.

    Attributes:
        name: its file.
        arguments: of the run.
        check: asserts what must be in its results.
        broken: changes the module so that a cache attends to other states. The run must then fail.
        broken_arguments: of that run, if they are others.
    """

    name: str
    arguments: Sequence[str]
    check: Callable[[Any, Any], None]
    broken: Callable[[Any, pytest.MonkeyPatch], object]
    broken_arguments: Sequence[str] = ()


def other(cache: type[kvlayers.DynamicCache]) -> Callable[..., kvlayers.Cache]:
    return lambda config, length=0: cache(config=config)


def contender(cache: type[kvlayers.DynamicCache]) -> Callable[[Any, pytest.MonkeyPatch], object]:
    return lambda module, patch: patch.setitem(module.CONTENDERS, module.KVLAYERS, other(cache))


def check_decode(module: Any, results: Any) -> None:
    assert set(results) == {"decode", "update", "peak", "sliding"}
    assert set(results["sliding"]["kvlayers.StaticCache"]["medians"]) == {"40", "80"}
    steps, peaks = results["decode"]["random"]["32"], results["peak"]["caches"]
    assert set(steps) == set(results["update"]["64"]) == set(peaks) == set(module.CONTENDERS)
    assert all([len(trial) for trial in entry["seconds"]] == [4] for entry in steps.values())
    # A cache says that it holds the bytes that are counted.
    assert all(entry["reported"] == 1 for entry in peaks.values())


def check_fidelity(module: Any, results: Any) -> None:
    [measured] = results
    exact = measured["plain"][module.EXACT.name]
    assert (exact["tokens"], exact["kl"], exact["kl_99"], exact["agreement"]) == (2 * 64, 0, 0, 1)
    assert 0 < measured["plain"]["transformers DynamicCache in bfloat16"]["kl"] < 1e-4
    # Two layers, two KV heads of 64, keys and values, two bytes each.
    assert measured["bytes"]["transformers DynamicCache"]["bytes"] == 2 * 2 * 64 * 2 * 2


def check_eviction(module: Any, results: Any) -> None:
    assert set(results) == set(module.PARTS)
    [decode] = results["decode"].values()
    assert set(decode) == set(module.decode_makers(64))
    assert [len(trial) for trial in decode[module.EVEN]["seconds"]] == [8]
    assert len(results["recall"]) == 3
    assert {"knorm", "snapkv"} <= set(results["prefill"])


def check_mla(module: Any, results: Any) -> None:
    assert set(results) == {"float32", "bfloat16"}
    assert set(results["bfloat16"]["200"]) == set(module.CACHES)


def check_prefix(module: Any, results: Any) -> None:
    steps = results["decode"]
    assert set(steps) == {"32, float32", "32, bfloat16", "32, int4"}
    assert all(len(entry["kvlayers, behind a hit"][0]) == 8 for entry in steps.values())
    # Two layers, two KV heads of 16, keys and values, two bytes each.
    assert results["insert"]["branch_bytes"] == 100 * 2 * 2 * 16 * 2 * 2
    assert all(moved >= results["insert"]["branch_bytes"] for moved in results["insert"]["moved_in_all"])


def lacking_tokens(module: Any, patch: pytest.MonkeyPatch) -> None:
    """Lets a store find caches without the end of what it covers."""
    stored = importlib.import_module("lib.stored")
    found = stored.hit_in

    def cropped(store: kvlayers.PrefixStore, ids: Tensor, covered: int) -> kvlayers.Cache:
        cache: kvlayers.Cache = found(store, ids, covered)
        cache.crop(covered // 4)
        return cache

    patch.setattr(stored, "hit_in", cropped)


def check_attention(module: Any, results: Any) -> None:
    measured = results["attention"]["400"]
    assert set(measured) == {*module.CACHES, module.READ}
    assert 0 < measured[module.bits(2)]["bytes"] < measured[module.bits(8)]["bytes"]
    assert all(measured[name]["share"] > 0 for name in module.CACHES)


def check_ordinary(module: Any, results: Any) -> None:
    assert set(results["steps"]) == {"1x64", "2x96"}
    assert set(results["steps"]["2x96"]) == {*module.EXACT, *module.QUANTIZED}
    assert [measured["same_tokens"] for measured in results["generate"].values()] == [True]


def check_offload(module: Any, results: Any) -> None:
    traffic = results["traffic"]
    # Four layers, two KV heads of 32, keys and values, two bytes each.
    new_token = 4 * 2 * 32 * 2 * 2
    for name in (module.KVLAYERS, module.STATIC):
        assert traffic[name]["to_host"] == new_token
        assert traffic[name]["to_device"] % new_token == 0
        assert traffic[name]["peak_on_device"] < traffic[name]["held"]
    assert traffic[module.KVLAYERS_PACKED]["to_device"] < traffic[module.KVLAYERS]["to_device"]


def check_sinks(module: Any, results: Any) -> None:
    [figures] = results["windows"].values()
    assert len(figures[module.SINKS]["steps"]) == 4
    assert figures[module.RECOMPUTED]["perplexity"] > 1


def kept_by_kvlayers(module: Any, patch: pytest.MonkeyPatch, is_wrong: bool) -> None:
    """Stands in for the process of kvpress, and keeps what kvlayers keeps, but for one token if it is to be wrong."""

    def found(python: str, config: Any, layers: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        kept: dict[str, Any] = {"versions": {"kvpress": "none"}}
        # A rule without the rotation keeps other tokens, so it is left out.
        for name in set(module.RULES) - {"expected_attention"}:
            for index, layer in enumerate(layers):
                scores = module.scores_of(eviction_rule(name), layer)
                for keep, (kind, floor) in itertools.product(module.KEEPS, (("", 1.0), (" AdaKV", HEAD_FLOOR))):
                    count, recent = int(scores.shape[2] * keep), module.NEWEST.get(name, 0)
                    chosen = module.sets_of(select(scores, count, recent=recent, floor=floor))
                    kept[f"{name} {keep} {index}{kind}"] = [sorted(head) for head in chosen]
        if is_wrong:
            head = kept["keydiff 0.25 1"][0]
            head[0] = next(token for token in range(70) if token not in head)
        return kept

    patch.setattr(module, "kvpress_found", found)


def check_kvpress(module: Any, results: Any) -> None:
    rules = results["random llama"]
    assert rules["snapkv"]["0.5 AdaKV"]["agreement"] == 1
    assert rules["keydiff"]["0.25"]["tokens_apart"] == 0


TINY = ("--quick", "--lengths", "32,64", "--trials", "1", "--steps", "4", "--stations", "40,80", "--skip", "static")
BRANCHES = ("--quick", "--only", "decode,insert", "--lengths", "32", "--steps", "8", "--trials", "1")
NATIVE = ("--quick", "--backends", "kvlayers:native", "--bits", "4")
ONE_THREAD = ("--quick", "--threads", "1")
PRESSES = ("--kvpress-python", "none", "--model", "none", "--tokens", "100")

SCRIPTS = {
    "decode": Script(
        "decode", TINY, check_decode, contender(OtherValues),
        (*TINY, "--skip", "update,peak,sliding,static", "--steps", "16"),
    ),
    "fidelity": Script(
        "fidelity", NATIVE, check_fidelity,
        lambda module, patch: patch.setitem(module.FULL, module.EXACT, other(OtherValues)),
    ),
    "eviction": Script(
        "eviction", (*ONE_THREAD, "--steps", "8"), check_eviction,
        lambda module, patch: patch.setattr(module, "evicting", lambda **options: other(OtherValues)),
        ("--quick", "--only", "prefill", "--rules", "knorm"),
    ),
    "latents": Script(
        "mla", ("--lengths", "200", "--steps", "2", "--threads", "1"), check_mla,
        lambda module, patch: patch.setitem(module.CACHES, module.KVLAYERS, module.packed(4)),
        ("--lengths", "400", "--steps", "1"),
    ),
    "prefix": Script(
        "prefix", BRANCHES, check_prefix, lacking_tokens, (*BRANCHES, "--only", "decode", "--kinds", "float32")
    ),
    "attention": Script(
        "attention", ONE_THREAD, check_attention,
        lambda module, patch: patch.setitem(module.CACHES, module.KVLAYERS, module.CACHES[module.bits(2)]),
    ),
    "ordinary": Script(
        "ordinary", ONE_THREAD, check_ordinary,
        lambda module, patch: patch.setitem(module.EXACT, module.KVLAYERS, other(OtherValues)),
        (*ONE_THREAD, "--only", "steps"),
    ),
    "offload": Script(
        "offload", ("--quick",), check_offload,
        lambda module, patch: patch.setitem(
            module.CACHES, module.KVLAYERS,
            lambda config, length, offloading: (OtherValues if offloading else kvlayers.DynamicCache)(
                config=config, offloading=offloading
            ),
        ),
    ),
    "sinks": Script(
        "sinks", ("--quick",), check_sinks,
        # As if the tokens were as likely with what is recomputed as the reading of random ones is.
        lambda module, patch: patch.setattr(module, "recompute", lambda *reading: 1.0),
    ),
    "kvpress": Script(
        "kvpress_indices", PRESSES, check_kvpress,
        lambda module, patch: kept_by_kvlayers(module, patch, is_wrong=True),
    ),
}  # fmt: skip
"""By what is measured."""


@pytest.fixture
def quick(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[..., Any]:
    """Runs a benchmark; returns its exit code, and the file that it wrote."""

    def run(module: Any, arguments: Sequence[str], *more: Any) -> tuple[int, dict[str, Any]]:
        output = tmp_path / "results" / "quick.json"
        code = module.main([*arguments, "--output", str(output)], *more)
        return code, json.loads(output.read_text())

    # One layer of latents is enough.
    monkeypatch.setattr(script("mla"), "LAYERS", 1)
    kept_by_kvlayers(script("kvpress_indices"), monkeypatch, is_wrong=False)
    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_quick_run_writes_what_was_measured_and_where(script: Any, quick: Any, name: str) -> None:
    run, module = SCRIPTS[name], script(SCRIPTS[name].name)
    code, written = quick(module, run.arguments)
    assert code == 0, written
    assert {"date", "hardware", "versions", "arguments", "results", "targets", "disagreements", "wrong"} == set(written)
    assert {"cpu", "cores", "threads", "ram_bytes"} <= set(written["hardware"])
    assert {"python", "torch", "transformers", "kvlayers"} <= set(written["versions"])
    run.check(module, written["results"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_cache_with_other_states_fails(script: Any, quick: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, module = SCRIPTS[name], script(SCRIPTS[name].name)
    run.broken(module, monkeypatch)
    code, written = quick(module, run.broken_arguments or run.arguments)
    assert code == 1
    assert written["wrong"] or [entry for entry in written["disagreements"] if not entry["tie"]]


@pytest.mark.parametrize(("part", "cache"), [("sliding", OtherValues), ("update", OtherKeys)])
def test_each_part_of_decode_compares_what_it_measures(
    script: Any, quick: Any, part: str, cache: type[kvlayers.DynamicCache]
) -> None:
    module = script("decode")
    others = ",".join({*module.SECTIONS} - {part})
    contenders = {**module.CONTENDERS, module.KVLAYERS: other(cache)}
    code, written = quick(module, [*TINY, "--skip", others, "--steps", "16"], contenders)
    assert code == 1
    assert {entry["cache"] for entry in written["disagreements"] if not entry["tie"]} == {module.KVLAYERS}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("sinks", ["--quick", "--window", "4"], "a window must be larger"),
        ("ordinary", ["--only", "nothing"], "got nothing"),
        ("eviction", ["--only", "decode,speed"], "got speed"),
        pytest.param(
            "offload",
            ["--quick", "--device", "cuda"],
            "there is no accelerator",
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is there"),
        ),
    ],
)
def test_arguments_that_mean_nothing_are_refused(
    script: Any, name: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script(name).main(arguments)
    assert message in capsys.readouterr().err


def test_fidelity_goes_on_without_a_cache_that_fails(
    script: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fidelity = script("fidelity")

    class Failing(kvlayers.DynamicCache):
        def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            if self.get_seq_length() >= 96:
                raise RuntimeError("no more")
            return super().update(*args, **kwargs)

    def run(library: str) -> int:
        makers = {fidelity.Contender(library, "native", 4): lambda config: Failing(config=config)}
        return fidelity.main(["--quick", "--output", str(tmp_path / "quick.json")], makers)

    assert run("transformers") == 0
    assert "transformers native, 4 bits failed: RuntimeError: no more" in capsys.readouterr().out
    measured = json.loads((tmp_path / "quick.json").read_text())["results"][0]
    assert measured["plain"]["transformers native, 4 bits"]["failure"] == "RuntimeError: no more"
    assert measured["plain"][fidelity.EXACT.name]["kl"] == 0
    assert run("kvlayers") == 1


@pytest.mark.parametrize(("backend", "package"), [("quanto", "optimum.quanto"), ("hqq", "hqq")])
def test_bytes_of_transformers_quantized_layers_are_those_of_codes_scales_zeros_and_residual(
    script: Any, backend: str, package: str
) -> None:
    pytest.importorskip(package)
    from lib.quantized import Contender, measure_bytes
    from lib.workload import RandomModel, Shape

    config = RandomModel(Shape(layers=2, heads=2, kv_heads=2, head_dim=64, intermediate=64, vocab=64)).model.config
    make = Contender("transformers", backend, 4).make
    tokens = 32 + 128 + 64
    # The first chunk is quantized at once, the next four when their residual is full, the last two not yet.
    quantized, residual = 32 + 128, 64
    of_a_vector = 64 // 2 + 2 + 2
    expected = 2 * 2 * 2 * (quantized * of_a_vector + residual * 64 * 2) / tokens
    assert measure_bytes(make, config, tokens - 64, 64, 32)["last_bytes"] == expected


def test_outliers_are_in_two_key_channels_and_only_while_asked_for(script: Any) -> None:
    from lib import outliers, quantized, workload

    model = workload.RandomModel(quantized.QUICK_SHAPE).model.float()
    ids = torch.arange(8)[None]

    def keys() -> Tensor:
        cache = kvlayers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        return cache.layers[1].keys[0].abs().amin(1)

    before = keys()
    with outliers.KeyOutliers("constant", 30.0).applied(model):
        large = keys() > 20
    assert large.nonzero().tolist() == [[0, 31], [0, 63], [1, 31], [1, 63]]
    assert torch.equal(keys(), before)


def test_live_bytes_count_the_old_and_the_new_buffer_of_a_concatenation(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lib import peak

    held = torch.zeros(100, dtype=torch.uint8)
    with peak.LiveBytes(ignored=[held]) as counter:
        grown = torch.cat([held, held])
        grown = torch.cat([grown, held])
        views = grown.view(3, 100)[1:]
        assert counter.now() == 300
        assert counter.peak == 500
        del grown
        assert counter.now() == 300
        del views
        assert counter.now() == 0


def test_bytes_that_operations_write_are_counted_and_views_are_not(script: Any) -> None:
    from lib.peak import MovedBytes

    states = torch.zeros(4, 8)
    with MovedBytes() as moved:
        states[:2].transpose(0, 1)
        torch.empty(100)
        assert moved.nbytes == 0
        states[:2].copy_(torch.ones(2, 8))
        # The ones, and the rows that they are written to.
        assert moved.nbytes == 2 * 64
        torch.cat([states, states])
        assert moved.nbytes == 2 * 64 + 256


def test_tokens_with_a_common_prefix_are_counted_once(script: Any) -> None:
    from lib.stored import distinct_tokens

    assert distinct_tokens([[1, 2, 3], [1, 2, 4, 5], [2]]) == 6


def test_calls_of_generate_with_other_tokens_are_disagreements(script: Any) -> None:
    from lib import compiled, timing, workload

    model = workload.RandomModel(workload.QUICK_SHAPE)
    job = compiled.Job(model.name, model.model, model.prompt(20), 16, 64, "eager")
    disagreements = timing.Disagreements()
    contenders = {
        compiled.REFERENCE: compiled.GENERATORS[compiled.REFERENCE],
        compiled.KVLAYERS: lambda job: {"past_key_values": OtherValues(config=job.model.config)},
    }
    measured = compiled.measure_generate(job, contenders, 1, disagreements, lambda: None)
    assert {entry["cache"] for entry in disagreements.found if not entry["tie"]} == {compiled.KVLAYERS}
    assert all(20 <= entry["tokens"] < 36 for entry in disagreements.found)
    assert all(len(entry["seconds"]) == 1 for entry in measured.values())


def test_compiled_contenders_have_nothing_to_do_with_one_another(script: Any) -> None:
    from lib import compiled

    class Doubling:
        def forward(self, numbers: Tensor) -> Tensor:
            return 2 * numbers

    inputs: list[Any] = []

    def backend(graph: Any, example_inputs: list[Any]) -> Any:
        inputs.append(example_inputs)
        return graph.forward

    first, second = (compiled.Compiled(Doubling(), {"backend": backend}) for _ in range(2))
    for _ in range(2):
        assert first(numbers=torch.ones(2)).tolist() == [2, 2]
        assert second(numbers=torch.ones(3)).tolist() == [2, 2, 2]
    assert (first.graphs, second.graphs) == (1, 1)
    # Where sizes are dynamic, they are inputs as well.
    assert [len(each) for each in inputs] == [1, 1]
    first(numbers=torch.ones(4))
    assert (first.graphs, second.graphs) == (2, 1)
    assert [len(each) for each in inputs] == [1, 1, 2]


def test_divergences_are_compared_with_the_better_of_transformers(script: Any) -> None:
    fidelity = script("fidelity")
    seen = {"quanto": 0.3, "hqq": 0.1}
    plain = {fidelity.Contender("transformers", name, 4).name: {"kl": kl} for name, kl in seen.items()}
    plain[fidelity.Contender("transformers", "quanto", 2).name] = {"failure": "no more"}
    plain[fidelity.Contender("transformers", "hqq", 2).name] = {"kl": float("nan")}
    assert fidelity.better_baseline(plain, 4) == {"kl": 0.1}
    assert fidelity.better_baseline(plain, 2) is None


ONLY_STATIC = ("--quick", "--skip", "decode,update,peak,sliding", "--trials", "1", "--steps", "16")


@pytest.mark.nightly
def test_static_caches_are_compared_eager_compiled_and_in_generate(script: Any, quick: Any) -> None:
    code, written = quick(script("decode"), [*ONLY_STATIC, "--times", "1,8"])
    assert code == 0
    static = written["results"]["static"]
    assert not [entry for entry in written["disagreements"] if not entry["tie"]]
    eager, compiled, generate = static["eager"]["64"], static["compiled"]["64"], static["generate"]
    names = [f"{library}.StaticCache, {times}x" for library in ("kvlayers", "transformers") for times in (1, 8)]
    assert [eager[name]["reserved"] for name in names] == [128, 512, 128, 512]
    for name in names:
        entry = compiled[f"{name}, compiled"]
        assert (len(entry["seconds"][0]), entry["graphs"], entry["recompiles"]) == (16, 1, 0)
    candidate, baseline = (
        generate["calls"][f"{library}.StaticCache, compiled"] for library in ("kvlayers", "transformers")
    )
    assert 1 <= candidate["graphs"] <= 3
    assert baseline["graphs"] == 1
    assert candidate["recompiles"] == baseline["recompiles"] == 0
    assert candidate["first"] > candidate["median"] > 0
    assert all(entry["graphs"] == 0 for name, entry in generate["calls"].items() if name.endswith("DynamicCache"))


@pytest.mark.nightly
def test_a_static_cache_with_other_tokens_fails(script: Any, quick: Any) -> None:
    module = script("decode")
    contenders = {**module.CONTENDERS, "kvlayers.StaticCache": lambda config, length: OtherStaticValues(config, length)}
    code, written = quick(module, [*ONLY_STATIC, "--times", "1", "--generate", "20,2,22"], contenders)
    assert code == 1
    failures = {entry["cache"] for entry in written["disagreements"] if not entry["tie"]}
    assert failures == {"kvlayers.StaticCache, 1x", "kvlayers.StaticCache, 1x, compiled"}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_exact_cache_decodes_to_the_end_and_another_text_ends_it(script: Any, temperature: float) -> None:
    long_decode, model = script("long_decode"), fresh_model("llama")
    prompt = torch.randint(model.config.vocab_size, (1, 20))

    def decoded(text: torch.Tensor | None = None) -> torch.Tensor:
        cache = tf.DynamicCache(config=model.config)
        found: torch.Tensor = long_decode.decode(model, prompt, cache, 12, temperature, text=text)
        return found

    text = decoded()
    assert torch.equal(decoded(text), text)
    text[0, 5] += 1
    assert decoded(text).shape[1] == 6


def test_samples_have_the_distribution_of_the_model(script: Any) -> None:
    # Of two tokens, one twice as likely as the other.
    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
            return tf.modeling_outputs.CausalLMOutput(logits=torch.tensor([[[2.0, 1.0]]]).log())

    found = script("long_decode").decode(Model(), torch.zeros(1, 1, dtype=torch.int64), None, 600, 1.0)
    assert 0.25 < float((found == 1).double().mean()) < 0.42


def test_a_long_decode_has_each_quarter(script: Any, quick: Any) -> None:
    long_decode = script("long_decode")
    code, written = quick(long_decode, ["--quick"])
    assert code == 0
    found = written["results"]["long_decode"]
    assert set(found) == {key.name for key in long_decode.MAKERS}
    for figures in found.values():
        assert len(figures["quarters"]) == 4
        assert len(figures["free"]) == 5
