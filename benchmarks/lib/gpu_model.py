"""Models with random weights on a device, the caches they decode with, and what they decode."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

import kvlayers
from kvlayers.tools.measuring.interleave import interleaved
from kvlayers.tools.measuring.predictions import is_tie
from lib.compiling import Compiled
from lib.contenders import Maker, fill
from lib.gpu_stage import Findings, Setup
from lib.gpu_timing import Memory, median, milliseconds
from lib.workload import Shape
from packed_reference import relative_error

EIGHT_BILLION = Shape(layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)
ONE_BILLION = Shape(layers=16, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=32768)
QUICK = Shape(layers=2, heads=4, kv_heads=2, head_dim=32, intermediate=64, vocab=256)
POSITIONS = 1 << 18
FILL_CHUNK = 8192

REFERENCE = "transformers dynamic"
DYNAMIC, STATIC = "kvlayers dynamic", "kvlayers static"
TRANSFORMERS_STATIC = "transformers static"
INT4, INT8, FP8 = "kvlayers int4", "kvlayers int8", "kvlayers fp8"

CACHES: dict[str, Maker] = {
    REFERENCE: lambda config, length: transformers.DynamicCache(config=config),
    DYNAMIC: lambda config, length: kvlayers.DynamicCache(config=config),
    INT4: lambda config, length: kvlayers.QuantizedCache(config=config, nbits=4),
    INT8: lambda config, length: kvlayers.QuantizedCache(config=config, nbits=8),
    FP8: lambda config, length: kvlayers.QuantizedCache("fp8", config),
    STATIC: lambda config, length: kvlayers.StaticCache(config, max_cache_len=length),
    TRANSFORMERS_STATIC: lambda config, length: transformers.StaticCache(config, max_cache_len=length),
}
"""The reference comes first: logits are compared with its."""

TRANSFORMERS_QUANTIZED: dict[str, Maker] = {
    "transformers quanto": lambda config, length: transformers.QuantizedCache(
        "quanto", config, nbits=4, axis_key=0, axis_value=0
    ),
    "transformers hqq": lambda config, length: transformers.QuantizedCache(
        "hqq", config, nbits=4, axis_key=1, axis_value=1
    ),
    "transformers fp8": lambda config, length: transformers.QuantizedCache("fp8", config),
}
"""Two of them need other packages, and the third a newer transformers."""

LOGITS_ERROR = {INT4: 0.3, INT8: 0.1, FP8: 0.15}
"""How far the logits of caches that round may be from the reference's, relative to their norm. States are random here,
so these are only limits beyond which something is broken: fidelity is measured with real models."""

EXACT_ERROR = 0.05
"""The same for caches in full precision, of which each token must be the reference's, too: kernels add in other orders,
in bfloat16."""

ROUNDINGS = 4
"""Roundings by which a logit may differ where states are held in full precision: kernels add in other orders."""


def usable(makers: Mapping[str, Maker], config: Any) -> tuple[dict[str, Maker], dict[str, str]]:
    """The caches that can be made here, and why the others cannot."""
    found: dict[str, Maker] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        try:
            make(config, 8)
            found[name] = make
        except (ImportError, TypeError, ValueError, AttributeError) as error:
            missing[name] = str(error).strip().splitlines()[0]
    return found, missing


def llama(setup: Setup, shape: Shape, **options: Any) -> Any:
    """A llama-like model with random weights, made on the device, in bfloat16.

    Args:
        setup: the device.
        shape: size of the model.
        options: other fields of its config. With `sliding_window` it is a mistral.
    """
    shape = setup.choose(shape, QUICK)
    sizes: dict[str, Any] = {
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_size": shape.heads * shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": POSITIONS,
        "eos_token_id": None,
        "pad_token_id": 0,
        **options,
    }
    config_class = transformers.MistralConfig if "sliding_window" in options else transformers.LlamaConfig
    torch.manual_seed(0)
    with torch.device(setup.device):
        return transformers.AutoModelForCausalLM.from_config(config_class(**sizes), dtype=torch.bfloat16).eval()


def eight_billion(setup: Setup) -> Any:
    """The model of Llama 3.1 8B's shape, made once for all steps in a row that use it."""
    return setup.keep("eight billion", lambda: llama(setup, EIGHT_BILLION))


def token_ids(setup: Setup, config: Any, batch: int, tokens: int) -> Tensor:
    """Random token ids `[batch, tokens]` on the device."""
    generator = torch.Generator(setup.device).manual_seed(tokens)
    return torch.randint(3, config.vocab_size, (batch, tokens), generator=generator, device=setup.device)


def fill_with_random(setup: Setup, config: Any, cache: Any, tokens: int, batch: int = 1) -> None:
    """Put random states into all layers of a cache, the same ones in each, in chunks as a prefill does."""
    shape = (batch, config.num_key_value_heads, tokens, config.head_dim)
    generator = torch.Generator(setup.device).manual_seed(0)
    keys, values = (
        torch.randn(shape, generator=generator, device=setup.device, dtype=torch.bfloat16) for _ in range(2)
    )
    fill(cache, [(keys, values)] * config.num_hidden_layers, FILL_CHUNK)


@dataclasses.dataclass
class Contender:
    """A cache that decodes.

    Attributes:
        cache: the cache.
        forward: the model's forward pass, compiled or not.
        logits: logits of each step, `[batch, vocab]`.
        times: milliseconds of a step, by trial.
        held: bytes that filling the cache took.
        peak: most bytes beyond those before the cache was made.
    """

    cache: Any
    forward: Callable[..., Any]
    logits: list[Tensor] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)
    held: int = 0
    peak: int = 0

    def decode(self, ids: Tensor) -> None:
        """Take the tokens `[batch, tokens]`, one at a time."""
        is_compiled = isinstance(self.forward, Compiled)
        for step in range(ids.shape[1]):
            if is_compiled:
                torch.compiler.cudagraph_mark_step_begin()
            logits = self.forward(input_ids=ids[:, step : step + 1], past_key_values=self.cache, use_cache=True).logits
            # The next step of a CUDA graph writes to the same memory.
            self.logits.append(logits[:, -1].clone() if is_compiled else logits[:, -1])


def measure_decoding(
    setup: Setup,
    model: Any,
    makers: Mapping[str, Maker],
    prepare: Callable[[Any], Any],
    length: int,
    batch: int,
    forwards: Mapping[str, Callable[..., Any]],
    findings: Findings,
) -> dict[str, Contender]:
    """Time decode steps of all contenders in turns, and compare their logits with those of the first one.

    Args:
        setup: the device.
        model: the model.
        makers: the caches.
        prepare: fills an empty cache, and returns the cache to decode with.
        length: tokens that static caches reserve.
        batch: sequences.
        forwards: forward passes of contenders that do not call the model itself.
        findings: gets figures, and what is wrong.
    """
    block, trials = setup.choose((16, 4), (2, 2))
    contenders: dict[str, Contender] = {}
    for name, make in makers.items():
        with Memory(setup) as memory:
            contenders[name] = Contender(prepare(make(model.config, length)), forwards.get(name, model))
        contenders[name].held, contenders[name].peak = memory.held, memory.held
    ids = token_ids(setup, model.config, batch, (trials + 1) * block)
    for trial in range(trials + 1):
        for name in interleaved(list(contenders), trial):
            contender, new = contenders[name], ids[:, trial * block : (trial + 1) * block]
            with Memory(setup) as memory:
                took = milliseconds(setup, lambda contender=contender, new=new: contender.decode(new)) / block
            # The first turn compiles kernels.
            if trial:
                contender.times.append(took)
                contender.peak = max(contender.peak, contender.held + memory.peak)
    reference = next(iter(contenders))
    for name, contender in contenders.items():
        compare_logits(findings, name, contenders[reference].logits, contender.logits)
        findings.add(f"{name}: a step", median(contender.times), "ms")
        if setup.on_cuda:
            findings.add(f"{name}: peak beyond the model", contender.peak / 1e9, "GB")
        findings.details[name] = {"ms": contender.times, "held": contender.held, "peak": contender.peak}
    return contenders


def compare_logits(findings: Findings, name: str, expected: list[Tensor], seen: list[Tensor]) -> None:
    """Say where logits `[batch, vocab]` of the same steps are not those of the reference."""
    allowed = LOGITS_ERROR.get(name, EXACT_ERROR)
    worst, others = 0.0, 0
    for one, other in zip(expected, seen, strict=True):
        one, other = one.float(), other.float()
        worst = max(worst, relative_error(other, one))
        for row, token in enumerate(other.argmax(-1).tolist()):
            greedy = int(one[row].argmax())
            others += token != greedy and not is_tie(one[row], greedy, token, torch.bfloat16, ROUNDINGS)
    # How good transformers' quantized caches are, is not what is asked here.
    if name not in TRANSFORMERS_QUANTIZED:
        findings.expect(worst <= allowed, f"{name}: logits differ from the reference's by {worst:.3f} of their norm")
        is_exact = name not in LOGITS_ERROR
        findings.expect(not (is_exact and others), f"{name}: {others} tokens are not the reference's, and no ties")
    findings.details.setdefault("logits", {})[name] = {"difference": worst, "other tokens": others}
