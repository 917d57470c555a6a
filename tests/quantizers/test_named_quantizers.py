"""Quantizers with the names of papers give the codes that the papers describe."""

import itertools
import math
import pathlib
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

import kvlayers
from kvlayers.errors import OptionError
from kvlayers.quantized.quantizers.codebook import NORMAL_FLOAT_LEVELS
from kvlayers.quantizers import CodeFormat, Quantizer, Side, SideOptions, backend, dequantize
from random_states import hadamard

SIDES: tuple[Side, Side] = ("keys", "values")


def made(name: str, nbits: int, side: Side, head_dim: int = 64, group_size: int | None = None) -> Quantizer:
    return backend(name).quantizer(SideOptions(side, nbits, None, group_size), head_dim)


def returned(quantizer: Quantizer, states: Tensor) -> Tensor:
    return dequantize(quantizer.quantize(states), quantizer.format, states.dtype)


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


@pytest.mark.parametrize(("name", "nbits"), [("kivi", 4), ("turboquant", 3), ("nf4", 4)])
def test_a_cache_of_a_named_quantizer_is_saved_and_goes_on(name: str, nbits: int, tmp_path: pathlib.Path) -> None:
    cache = kvlayers.QuantizedCache(backend=name, nbits=nbits)
    cache.update(*torch.randn(2, 1, 2, 300, 64).unbind(), 0)
    kvlayers.save_cache(cache, tmp_path / "cache.safetensors")
    loaded = kvlayers.load_cache(tmp_path / "cache.safetensors")
    more = torch.randn(2, 1, 2, 70, 64)
    for seen, expected in zip(loaded.update(*more.unbind(), 0), cache.update(*more.unbind(), 0), strict=True):
        assert torch.equal(torch.as_tensor(seen + 0), torch.as_tensor(expected + 0))


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
