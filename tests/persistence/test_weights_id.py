"""An id of weights is another one where a single element differs, anywhere, and is made once."""

import copy
import functools
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers as tf

import kvlayers
import versions
from kvlayers.persistence import fingerprint
from models import fresh_model, read
from spies import spy

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool)


def id_of(weight: torch.Tensor, name: str = "weight") -> str:
    """That of a module of one weight."""
    module = torch.nn.Module()
    module.register_buffer(name, weight)
    return kvlayers.weights_id(module)


def states(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(3))
    return (values % 2).bool() if dtype == torch.bool else values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_element_changes_it_and_a_copy_does_not(dtype: torch.dtype) -> None:
    # Of more than a block, and of a size that no word divides.
    size = fingerprint.BLOCK * 8 // dtype.itemsize + 13
    weight = states(dtype, size)
    seen = {id_of(weight)}
    places = (0, 1, size // 2, size - 14, size - 2, size - 1)
    for place in places:
        other = weight.clone()
        other[place] = not other[place] if dtype == torch.bool else other[place] + 1
        seen.add(id_of(other))
    assert (len(seen), id_of(weight.clone())) == (1 + len(places), id_of(weight))


def test_each_element_of_a_model_counts() -> None:
    """Also of buffers that are not saved."""
    model = fresh_model("llama")
    before = kvlayers.weights_id(model)
    for place in range(len([*model.parameters(), *model.buffers()])):
        other = copy.deepcopy(model)
        twin = [*other.parameters(), *other.buffers()][place].data
        twin.view(-1)[twin.numel() * 2 // 3] += 0.01
        assert kvlayers.weights_id(other) != before
    assert kvlayers.weights_id(copy.deepcopy(model)) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_what_has_changed_places_is_another_weight(dtype: torch.dtype) -> None:
    weight = states(dtype, 96, 64)
    weight[:, 0] = torch.arange(96)
    before, generator = id_of(weight), torch.Generator().manual_seed(0)
    for _ in range(20):
        one, two = torch.randperm(96, generator=generator)[:2].tolist()
        rows, columns = weight.clone(), weight.clone()
        rows[[one, two]] = rows[[two, one]]
        # Two elements of a row, of which the sum stays the same.
        columns[one, 5], columns[one, 9] = columns[one, 5] + 1, columns[one, 9] - 1
        assert len({before, id_of(rows), id_of(columns)}) == 3


def test_differences_in_the_highest_bits_alone_are_seen() -> None:
    # Each changes the sign of the last element in a word: the highest bit of all, which odd factors keep the highest.
    weight = torch.ones(4096, dtype=torch.bfloat16)
    seen = {id_of(weight)}
    for one in range(3, 400, 4):
        other = weight.clone()
        other[one] = other[one + 4] = -1
        seen.add(id_of(other))
    assert len(seen) == 101


def test_it_does_not_depend_on_how_a_weight_lies_in_memory() -> None:
    weight = states(torch.bfloat16, 33, 17)
    expected = id_of(weight)
    assert id_of(weight.t().contiguous().t()) == expected
    padded = torch.zeros(33, 40, dtype=torch.bfloat16)
    padded[:, 3:20] = weight
    assert id_of(padded[:, 3:20]) == expected
    shifted = torch.zeros(weight.numel() + 3, dtype=torch.bfloat16)
    shifted[3:] = weight.view(-1)
    assert id_of(shifted[3:].view(33, 17)) == expected


def test_names_dtypes_shapes_and_special_values_count() -> None:
    weight, special = torch.arange(24, dtype=torch.float32), torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    weights = [weight, weight.view(4, 6), weight.view(torch.int32), torch.empty(0, 4), torch.tensor(3.0)]
    weights += [special, special.flip(0), special[2:3], special[3:]]
    ids = [id_of(weight, "other"), *map(id_of, weights)]
    assert (len(set(ids)), id_of(special)) == (len(ids), id_of(special.clone()))


def test_tied_weights_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = fresh_model("llama", tie_word_embeddings=True), []
    spy(monkeypatch, fingerprint, "_block_sums", read.append)
    expected = kvlayers.weights_id(model)
    # The frequencies of RoPE are no part of its state_dict().
    different = len(model.state_dict()) - 1 + len(list(model.model.rotary_emb.buffers()))
    assert len(read) == different
    assert (kvlayers.weights_id(model), len(read)) == (expected, different)
    with torch.no_grad():
        model.lm_head.weight[5, 5] += 1
    assert kvlayers.weights_id(model) != expected
    assert len(read) == 2 * different


def test_threads_make_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = fresh_model("llama"), []
    spy(monkeypatch, fingerprint, "_digest", lambda *read: made.append(0))
    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(kvlayers.weights_id, [model] * 8))) == len(made) == 1


def test_weights_that_are_not_in_memory_are_refused() -> None:
    with torch.device("meta"), pytest.raises(kvlayers.errors.ConfigError, match="meta tensor"):
        kvlayers.weights_id(torch.nn.Linear(2, 2))


def test_it_is_what_it_was() -> None:
    # Files and stores of today are looked for tomorrow, and by other machines.
    weight = torch.arange(10_000, dtype=torch.int32).view(100, 100)
    assert id_of(weight) == "all:5b4dac8df2921d344ce5cf21e0b0fef2629bf5707bd2a15497b1f4d009dcf92d"


def test_weights_of_a_class_of_their_own_are_read_by_their_parts() -> None:
    two = pytest.importorskip("torch.testing._internal.two_tensor", reason="torch comes without its test classes")

    def weight(last: float) -> Any:
        return two.TwoTensor(torch.ones(4), torch.tensor([1.0, 2.0, 3.0, last]))

    assert id_of(weight(4.0)) == id_of(weight(4.0)) != id_of(weight(5.0))


class Scaled(torch.nn.Module):
    """A module that reads an attribute."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.ones_(self.linear.weight)
        self.scale = scale


def twice(states: torch.Tensor) -> torch.Tensor:
    return states * 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.5, 0.25),
        (True, False),
        ((1, 2), (1, 3)),
        ([1.0], [2.0]),
        ({"default": 2.0}, {"default": 4.0}),
        ({1, 2}, {1, 3}),
        (torch.ones(3), torch.tensor([1.0, 1.0, 2.0])),
        ([torch.ones(3)], [torch.zeros(3)]),
        (torch.nn.functional.gelu, torch.nn.functional.silu),
        (torch.tanh, torch.sin),
        (functools.partial(torch.clamp, min=0), functools.partial(torch.clamp, min=1)),
        (types.SimpleNamespace(absmax=torch.ones(2)), types.SimpleNamespace(absmax=torch.zeros(2))),
    ],
)
def test_attributes_that_a_pass_may_read_count(one: Any, other: Any) -> None:
    model = Scaled(one)
    before = kvlayers.weights_id(model)
    assert before == kvlayers.weights_id(Scaled(copy.deepcopy(one)))
    model.scale = other
    assert kvlayers.weights_id(model) == kvlayers.weights_id(Scaled(other)) != before


@pytest.mark.parametrize(
    "held",
    [
        lambda states: states,
        twice.__get__(torch.ones(1)),
        threading.Lock(),
        torch.ones(2, 2).to_sparse(),
        [torch.nn.Linear(2, 2).share_memory],
    ],
    ids=["lambda", "method", "lock", "sparse", "methods"],
)
def test_what_cannot_be_compared_is_refused(held: Any) -> None:
    with pytest.raises(kvlayers.errors.ConfigError, match=r"must be comparable, but scale is or holds a .* own `weig"):
        kvlayers.weights_id(Scaled(held))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_packed_weights_are_refused() -> None:
    model = fresh_model("llama")
    torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    with pytest.raises(kvlayers.errors.ConfigError, match="must be comparable"):
        kvlayers.weights_id(model)


def test_objects_that_hold_one_another_are_read_once() -> None:
    def of_a_ring(number: int) -> str:
        first, second = types.SimpleNamespace(number=number), types.SimpleNamespace()
        first.next, second.next = second, first
        return kvlayers.weights_id(Scaled(first))

    assert of_a_ring(1) == of_a_ring(1) != of_a_ring(2)


@pytest.mark.parametrize(
    "own",
    [
        {"rope_type": "dynamic"},
        {
            "rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_frequencies_that_a_long_prompt_replaces_do_not_count(own: dict[str, Any]) -> None:
    rope = {"factor": 2.0, "rope_theta": 10000.0, **own}
    model = fresh_model("llama", **versions.rope(**rope), max_position_embeddings=16)
    before, first = kvlayers.weights_id(model), model.model.rotary_emb.inv_freq.clone()
    read(model, torch.randint(3, 90, (1, 40)))
    assert not torch.equal(model.model.rotary_emb.inv_freq, first)
    assert kvlayers.weights_id(model) == before


def test_a_compiled_call_has_the_weights_of_its_model() -> None:
    """`generate()` keeps the compiled forward pass, and its options, as attributes of the model."""
    model = fresh_model("llama")
    before = kvlayers.weights_id(model)
    model.get_compiled_call(tf.CompileConfig(backend="eager"))
    assert kvlayers.weights_id(model) == before
