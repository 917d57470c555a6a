"""Quantizers: what codes stand for, how far that is from the states, and whose numbers they are."""

import itertools
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fresh_process
from kvlayers.core.buffer import StateForm
from kvlayers.errors import OptionError, RegistryError
from kvlayers.interop.adapter import TransformersLayer
from kvlayers.kernels.codes.groups import rotate
from kvlayers.quantized.quantizers import other_packages
from kvlayers.quantized.quantizers.codebook import NORMAL_FLOAT_LEVELS
from kvlayers.quantizers import (
    Backend,
    CodeFormat,
    QuantizedGroups,
    Quantizer,
    Side,
    SideOptions,
    backend,
    dequantize,
    quantizer_names,
    register_quantizer,
    unregister_quantizer,
)
from matrix import product
from random_states import hadamard

SIDES: tuple[Side, Side] = ("keys", "values")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EVERY = [
    ("native", 2, None),
    ("native", 3, None),
    ("native", 4, None),
    ("native", 5, None),
    ("native", 6, None),
    ("native", 8, None),
    ("fp8", 8, None),
    ("quanto", 2, 0),
    ("quanto", 4, -1),
    ("hqq", 1, 1),
    ("hqq", 3, 0),
    ("hqq", 8, 1),
]
NATIVE_AND_FP8 = [(name, nbits) for name, nbits, _ in EVERY if name in ("native", "fp8")]
NAMED = [("kivi", 2), ("kivi", 4), *(("turboquant", nbits) for nbits in (1, 2, 3, 4)), ("nf4", 4)]


def made(name: str, nbits: int, side: Side = "keys", head_dim: int = 64, **options: Any) -> Quantizer:
    """A quantizer; the test is skipped where the package it needs is missing."""
    if name == "quanto":
        pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    if name == "hqq":
        pytest.importorskip("hqq", reason="hqq is not installed")
    return backend(name).quantizer(SideOptions(side, nbits, **options), head_dim)


def returned(quantizer: Quantizer, states: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """States after quantizing and back."""
    return dequantize(quantizer.quantize(states), quantizer.format, dtype)


def states_of(dtype: torch.dtype = torch.float32, heads: int = 2, tokens: int = 128, head_dim: int = 64) -> Tensor:
    return torch.randn(1, heads, tokens, head_dim).to(dtype)


def same(left: QuantizedGroups, right: QuantizedGroups) -> bool:
    zeros = left.zero is right.zero is None or torch.equal(left.zero, right.zero)  # type: ignore[arg-type]
    return torch.equal(left.codes, right.codes) and torch.equal(left.scale, right.scale) and zeros


def as_quantized(quantizer: Quantizer, states: Tensor) -> Tensor:
    """States as the quantizer has them before it groups them."""
    return rotate(states.float()) if quantizer.format.rotated else states.float()


# What a quantizer returns


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("name", "nbits", "axis"), EVERY)
def test_codes_do_not_depend_on_what_else_is_quantized_at_once(
    name: str, nbits: int, axis: int | None, side: Side
) -> None:
    quantizer = made(name, nbits, side, axis=axis)
    # So many that a search among ranges takes several parts, and that the last one is shorter.
    states = torch.randn(2, 3, 64 * 25, 64)
    whole = quantizer.quantize(states.clone())
    # The states stay as they are.
    assert same(whole, quantizer.quantize(states))
    assert same(whole, quantizer.quantize(states))
    for batch, start in ((0, 0), (1, 64), (1, 256), (0, 1536)):
        part = quantizer.quantize(states[batch : batch + 1, :, start : start + 64])
        assert torch.equal(part.codes, whole.codes[batch : batch + 1, :, start : start + 64])


@pytest.mark.parametrize(
    ("name", "nbits", "axis", "side", "head_dim"), product(EVERY, SIDES, (4, 6, 40, 80, 96, 128, 256))
)
def test_head_dims_of_every_kind(name: str, nbits: int, axis: int | None, side: Side, head_dim: int) -> None:
    quantizer = made(name, nbits, side, head_dim, axis=axis)
    states = states_of(heads=1, tokens=64, head_dim=head_dim)
    assert head_dim % quantizer.format.group_channels == 0
    error = (returned(quantizer, states) - states).square().mean()
    assert error < {1: 3.0, 2: 0.25, 3: 0.06, 4: 0.02, 5: 0.006, 6: 0.002, 8: 0.001}[nbits]


# How near the states are


@pytest.mark.parametrize(("nbits", "side", "dtype"), product([1, 2, 3, 4, 5, 6, 8], SIDES, DTYPES))
@settings(max_examples=15)
@given(magnitude=st.floats(-6, 4), offset=st.floats(-20, 20), seed=st.integers(0, 1000))
def test_squared_error_is_at_most_that_of_the_plain_range(
    nbits: int, side: Side, dtype: torch.dtype, magnitude: float, offset: float, seed: int
) -> None:
    torch.manual_seed(seed)
    states = ((torch.randn(1, 1, 64, 16) + offset) * 10**magnitude).clamp(-8000, 8000).to(dtype)
    quantizer = made("native", nbits, side, 16)
    dim = -2 if side == "keys" else -1
    exact = as_quantized(quantizer, states)
    error = as_quantized(quantizer, returned(quantizer, states)) - exact
    step = (exact.amax(dim, keepdim=True) - exact.amin(dim, keepdim=True)) / (2**nbits - 1)
    # A grid with the ends of the range leaves at most half a step; its stored numbers are rounded.
    rounding = torch.finfo(dtype).eps * (exact.abs().amax(dim, keepdim=True) + step * 2**nbits)
    bound = (step / 2 + rounding + torch.finfo(dtype).smallest_normal).square() * exact.shape[dim]
    assert (error.square().sum(dim, keepdim=True) <= bound).all()


@pytest.mark.parametrize("nbits", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("side", SIDES)
def test_the_search_beats_the_plain_range(nbits: int, side: Side) -> None:
    quantizer = made("native", nbits, side)
    states = states_of(tokens=512)
    exact = as_quantized(quantizer, states)
    dim = -2 if side == "keys" else -1
    blocks = torch.unflatten(exact, -2, (-1, 64)) if side == "keys" else exact
    low = blocks.amin(dim, keepdim=True)
    step = (blocks.amax(dim, keepdim=True) - low) / (2**nbits - 1)
    plain = (((blocks - low) / step).round() * step + low - blocks).square().mean()
    searched = (returned(quantizer, states) - states).square().mean()
    assert searched < plain * {1: 0.5, 2: 0.58, 3: 0.78, 4: 0.88, 5: 0.9, 6: 0.9}[nbits]


@pytest.mark.parametrize("bias", [20.0, 200.0])
def test_the_stored_zero_of_a_large_bias_is_what_the_codes_count_from(bias: float) -> None:
    states = (torch.randn(1, 1, 64, 8) + bias).to(torch.bfloat16)
    error = (returned(made("native", 4, head_dim=8), states) - states.float()).square().mean().sqrt()
    assert error < 0.11


@pytest.mark.parametrize(("nbits", "side", "dtype"), product([1, 2, 3, 4, 5, 6, 8], SIDES, DTYPES))
def test_constant_groups_come_back_exactly(nbits: int, side: Side, dtype: torch.dtype) -> None:
    quantizer = made("native", nbits, side, 16)
    for value in (0.0, 1.0, -37.25, 8000.0):
        states = torch.full((1, 2, 64, 16), value).to(dtype)
        if quantizer.format.rotated and side == "values":
            # Each of the rotated channels of such a token is the same.
            states = torch.nn.functional.pad(states[..., :1], (0, 15))
        assert torch.equal(returned(quantizer, states, dtype), states)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "nbits"), [*NATIVE_AND_FP8, *NAMED])
def test_tokens_of_zeros_stay_zeros(name: str, nbits: int, dtype: torch.dtype) -> None:
    states = states_of(dtype)
    states[:, :, 5:9] = 0
    assert not returned(made(name, nbits, "values"), states)[:, :, 5:9].any()
    states[:, :, :64] = 0
    assert not returned(made(name, nbits, "keys"), states)[:, :, :64].any()


@pytest.mark.parametrize(("name", "nbits", "side", "dtype"), product([*NATIVE_AND_FP8, *NAMED], SIDES, DTYPES))
def test_finite_states_of_any_size_come_back_finite(name: str, nbits: int, side: Side, dtype: torch.dtype) -> None:
    numbers = torch.finfo(dtype)
    smallest = numbers.smallest_normal * numbers.eps
    extremes = torch.tensor([numbers.max, -numbers.max, numbers.max / 2, smallest, -smallest, 0.0, 1.0]).to(dtype)
    quantizer = made(name, nbits, side)
    for _ in range(3):
        mixed = extremes[torch.randint(len(extremes), (1, 2, 64, 64))]
        tiny = extremes[torch.randint(3, 6, (1, 2, 64, 64))]
        high = extremes[torch.randint(0, 1, (1, 2, 64, 64))] * torch.rand(1, 2, 64, 64).to(dtype)
        constant = torch.full((1, 2, 64, 64), 37.3, dtype=dtype)
        rotated_constant = torch.nn.functional.pad(torch.randn(1, 2, 64, 1).to(dtype), (0, 63))
        for states in (mixed, tiny, high, constant, rotated_constant, extremes[:1].expand(1, 2, 64, 64)):
            groups = quantizer.quantize(states)
            for numbers in (groups.scale, groups.zero, dequantize(groups, quantizer.format, dtype)):
                assert numbers is None or numbers.isfinite().all()


def test_float16_keeps_its_small_states() -> None:
    states = (torch.rand(1, 1, 64, 8) * 1e-5).to(torch.float16)
    error = (returned(made("native", 8, head_dim=8), states) - states.float()).square().mean().sqrt()
    assert error <= torch.finfo(torch.float16).smallest_normal * torch.finfo(torch.float16).eps


# Float8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", SIDES)
@given(magnitude=st.floats(-30, 30), seed=st.integers(0, 1000))
def test_fp8_never_clips(side: Side, dtype: torch.dtype, magnitude: float, seed: int) -> None:
    torch.manual_seed(seed)
    states = (torch.randn(1, 1, 64, 64) * 2.0**magnitude).clamp(-6e4, 6e4).to(dtype)
    quantizer = made("fp8", 8, side)
    groups = quantizer.quantize(states)
    assert not groups.codes.view(torch.float8_e4m3fn).float().isnan().any()
    largest = states.float().abs().amax()
    back = dequantize(groups, quantizer.format, torch.float32)
    assert back.abs().amax() <= largest * 1.07
    assert back.abs().amax() >= largest * 0.93 - torch.finfo(dtype).smallest_normal * 450


def test_fp8_scales_are_rounded_up() -> None:
    states = states_of(torch.bfloat16)
    scale = made("fp8", 8, "values").quantize(states).scale
    assert (scale.double() * 448 >= states.double().abs().amax(-1, keepdim=True)).all()


# The numbers of the packages


def transformers_layer(name: str, nbits: int, axis: int, group_size: int) -> Callable[[Tensor], Tensor]:
    """States after the quantizer of a transformers layer, and back."""
    from transformers import cache_utils

    kind = {"quanto": cache_utils.QuantoQuantizedLayer, "hqq": cache_utils.HQQQuantizedLayer}[name]
    layer: Any = kind(nbits=nbits, axis_key=axis, axis_value=axis, q_group_size=group_size)

    def quantize(states: Tensor) -> Tensor:
        form = StateForm(1, 1, states.shape[-1], states.dtype, states.device)
        TransformersLayer(layer).reserve_form(form, form)
        held: Tensor = layer._dequantize(layer._quantize(states.contiguous(), axis=axis))
        return held

    return quantize


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group_size", [32, 64])
@pytest.mark.parametrize("nbits", [2, 4])
@pytest.mark.parametrize("axis", [0, -1])
def test_quanto_gives_the_numbers_of_transformers(axis: int, nbits: int, group_size: int, dtype: torch.dtype) -> None:
    quantizer = made("quanto", nbits, axis=axis, group_size=group_size)
    states = torch.randn(2, 3, 128, 64).to(dtype)
    expected = transformers_layer("quanto", nbits, axis, group_size)(states).float()
    torch.testing.assert_close(returned(quantizer, states), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nbits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("axis", [0, 1])
def test_hqq_gives_the_numbers_of_transformers(axis: int, nbits: int, dtype: torch.dtype) -> None:
    quantizer = made("hqq", nbits, axis=axis)
    # At axis 0 transformers has channels of a token in a group with those of other heads, unless there is one block.
    states = torch.randn(1, 1 if axis == 0 else 3, 64, 64).to(dtype)
    if nbits == 3 and axis == 1:
        # HQQ reads the number of groups from the first two sizes of the states, as it would of a matrix.
        states = states.flatten(0, 2)
    expected = transformers_layer("hqq", nbits, axis, 64)(states).float().view(1, -1, 64, 64)
    states = states.view(1, -1, 64, 64)
    # Transformers rounds HQQ's own zero, which counts in steps.
    step = 8 / (2**nbits - 1)
    rounding = torch.finfo(dtype).eps * (8 + 2**nbits * step)
    torch.testing.assert_close(returned(quantizer, states), expected, rtol=0, atol=rounding)


@pytest.mark.parametrize("axis", [0, -1])
def test_quanto_in_float16_does_not_overflow(axis: int) -> None:
    quantizer = made("quanto", 4, axis=axis)
    states = torch.empty(1, 1, 64, 64).uniform_(-65504, 65504).to(torch.float16)
    assert ((returned(quantizer, states) - states.float()).abs() < 4500).all()


def test_quanto_quantizes_a_single_group() -> None:
    quantizer = made("quanto", 4, axis=0)
    states = torch.randn(1, 1, 3, 64)
    whole, one = quantizer.quantize(states), quantizer.quantize(states[:, :, :1])
    assert torch.equal(whole.codes[:, :, :1], one.codes)


@pytest.mark.parametrize("name", ["quanto", "hqq"])
def test_packages_say_nothing(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    made(name, 4).quantize(states_of())
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_importing_the_quantizers_imports_no_package_of_theirs() -> None:
    # Not by looking at what was imported: transformers imports hqq where it is installed, until 5.0 with its caches.
    hidden = "sys.modules.update({'hqq': None, 'optimum': None})"
    ran = fresh_process.run(f"import sys; import transformers.cache_utils; {hidden}; import kvlayers.quantizers")
    assert ran.returncode == 0, ran.stderr


# Options and names


@pytest.mark.parametrize(
    ("name", "nbits", "axis"), [("native", 4, None), ("fp8", 8, None), ("quanto", 4, 0), ("hqq", 4, 1)]
)
def test_a_group_size_that_does_not_divide_the_head_dim_becomes_the_largest_that_does(
    name: str, nbits: int, axis: int | None, recwarn: pytest.WarningsRecorder
) -> None:
    assert made(name, nbits, "values", 40, axis=axis, group_size=20).format.group_channels == 20
    assert not [warning for warning in recwarn if "group size" in str(warning.message)]
    for head_dim, asked, used in ((40, 64, 40), (80, 64, 40), (96, 64, 48), (4, 8, 4), (7, 6, 1)):
        with pytest.warns(UserWarning, match=f"head_dim {head_dim} of the values, got {asked}: groups of {used}"):
            quantizer = made(name, nbits, "values", head_dim, axis=axis, group_size=asked)
        assert quantizer.format.group_channels == used


@pytest.mark.parametrize(("name", "package", "extra"), [("quanto", "optimum-quanto", "quanto"), ("hqq", "hqq", "hqq")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(module: str) -> None:
        raise ImportError(f"No module named '{module}'")

    monkeypatch.setattr(other_packages.importlib, "import_module", missing)
    message = rf'run `pip install {package}`, or `pip install "\.\[{extra}\]"`'
    for use in (backend(name).check, lambda options: backend(name).quantizer(options, 64)):
        with pytest.raises(OptionError, match=message):
            use(SideOptions("keys", 4))


@pytest.mark.parametrize("name", ["nativ", "", None, 4, ["native"]])
def test_an_unknown_name_lists_those_that_there_are(name: Any) -> None:
    with pytest.raises(OptionError, match="fp8, hqq, kivi, native, nf4, quanto, turboquant"):
        backend(name)


def test_a_backend_of_ones_own() -> None:
    @register_quantizer("own")
    class Own(Backend):
        name = "own"
        widths = (8,)

        def quantizer(self, options: SideOptions, head_dim: int) -> Quantizer:
            raise NotImplementedError

    try:
        assert type(backend("own")) is Own
        with pytest.raises(RegistryError, match="'own' is already registered"):
            register_quantizer("own")(Own)
    finally:
        unregister_quantizer("own")
    assert "own" not in quantizer_names()
    for act, name in ((unregister_quantizer, "own"), (register_quantizer, " ")):
        with pytest.raises(RegistryError, match="own|not empty"):
            act(name)


def test_a_factory_that_returns_no_backend() -> None:
    register_quantizer("odd")(lambda: 3)  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(RegistryError, match="'odd' must return an object of Backend, but returned a int"):
            backend("odd")
    finally:
        unregister_quantizer("odd")


# The codes that papers describe


@pytest.mark.parametrize("nbits", [2, 4])
@pytest.mark.parametrize("side", SIDES)
def test_kivi_divides_the_range_of_32_states(side: Side, nbits: int) -> None:
    states = torch.randn(2, 2, 96, 64)
    groups = states.unflatten(2, (-1, 32)) if side == "keys" else states.unflatten(3, (-1, 32))
    dim = 3 if side == "keys" else 4
    least, most = (bound.double() for bound in (groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)))
    step = (most - least) / (2**nbits - 1)
    expected = (((groups - least) / step).round() * step + least).reshape(states.shape)
    seen = returned(made("kivi", nbits, side), states).double()
    # A state in the middle between two codes may get either.
    assert ((seen - expected).abs() < 1e-5).double().mean() > 0.999


def gaussian_levels(bits: int) -> tuple[float, ...]:
    return made("turboquant", bits, "keys").format.levels


@pytest.mark.parametrize(
    ("bits", "above_zero"),
    [
        (1, [0.7980]),
        (2, [0.4528, 1.510]),
        (3, [0.2451, 0.7560, 1.344, 2.152]),
        (4, [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733]),
    ],
)
def test_levels_for_a_normal_number_are_those_of_max(bits: int, above_zero: list[float]) -> None:
    # J. Max, Quantizing for minimum distortion, 1960, table I.
    levels = gaussian_levels(bits)
    assert levels[len(levels) // 2 :] == pytest.approx(above_zero, abs=6e-4)
    assert levels[: len(levels) // 2] == pytest.approx([-level for level in reversed(above_zero)], abs=6e-4)
    # Each is the mean of the numbers that are nearest to it.
    normal = NormalDist()
    borders = [-math.inf, *(sum(neighbours) / 2 for neighbours in itertools.pairwise(levels)), math.inf]
    for level, (low, high) in zip(levels, itertools.pairwise(borders), strict=True):
        mean = (normal.pdf(low) - normal.pdf(high)) / (normal.cdf(high) - normal.cdf(low))
        assert level == pytest.approx(mean, abs=1e-9)


def test_normal_float_levels_are_those_of_the_paper() -> None:
    below = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500]
    above = [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]
    assert pytest.approx([*below, 0.0, *above], abs=1e-5) == NORMAL_FLOAT_LEVELS
    # Quantiles at equal distances from the median to the mean of the outermost ones of 16 and of 15 equal parts.
    quantile, largest = NormalDist().inv_cdf, 1 - (1 / 32 + 1 / 30) / 2
    for levels in (NORMAL_FLOAT_LEVELS[7::-1], NORMAL_FLOAT_LEVELS[7:]):
        steps = len(levels) - 1
        expected = [quantile(0.5 + (largest - 0.5) * step / steps) / quantile(largest) for step in range(steps + 1)]
        assert list(map(abs, levels)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("side", SIDES)
def test_nf4_takes_the_nearest_level_times_the_largest_state(side: Side) -> None:
    states = torch.randn(1, 2, 128, 64)
    dim = 3 if side == "keys" else 4
    groups = states.unflatten(2, (-1, 64)) if side == "keys" else states.unflatten(3, (-1, 64))
    scale = groups.abs().amax(dim, keepdim=True)
    levels = torch.tensor(NORMAL_FLOAT_LEVELS)
    nearest = ((groups / scale)[..., None] - levels).abs().argmin(-1)
    expected = (levels[nearest] * scale).reshape(states.shape)
    torch.testing.assert_close(returned(made("nf4", 4, side), states), expected)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_turboquant_rotates_and_has_the_distortion_of_max(bits: int, distortion: float, side: Side) -> None:
    # Sparse vectors, whose states are not normal before the rotation, of very different norms.
    states = torch.randn(1, 2, 512, 128) * (torch.rand(1, 2, 512, 128) < 0.2) * torch.logspace(-2, 2, 512)[:, None]
    quantizer = made("turboquant", bits, side, 128)
    norm = states.norm(dim=-1)
    assert torch.allclose(quantizer.quantize(states).scale[..., 0], norm / 128**0.5, rtol=1e-4)
    seen = returned(quantizer, states)
    error = ((seen - states).square().sum(-1) / norm.square()).mean()
    assert 0.9 * distortion < error < 1.05 * distortion
    levels = torch.tensor(gaussian_levels(bits), dtype=torch.float64) / 128**0.5
    units = states.double() @ hadamard(128) / norm.double()[..., None]
    expected = levels[(units[..., None] - levels).abs().argmin(-1)] * norm[..., None] @ hadamard(128)
    assert ((seen - expected).norm(dim=-1) < 1e-4 * norm).double().mean() > 0.99


def test_turboquant_has_one_scale_for_a_vector() -> None:
    assert made("turboquant", 2, "keys", 80).format.group_channels == 80
    with pytest.raises(OptionError, match="The group size must be left out for turboquant, .* got 32 for keys"):
        made("turboquant", 2, "keys", group_size=32)


@pytest.mark.parametrize(
    "options", [{"bits": 2, "levels": (1.0,)}, {"bits": 8, "levels": (0.0,) * 256}, {"bits": 2, "levels": (0.0,) * 5}]
)
def test_a_codebook_that_no_kernel_holds_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError, match="A codebook must have a level for each code of at most 4 bits"):
        CodeFormat(group_tokens=1, group_channels=64, **options)  # type: ignore[arg-type]
