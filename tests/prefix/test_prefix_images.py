"""Images in a prefix store: a second question about an image computes neither the prefix nor the image again."""

import pathlib
import random
from typing import Any

import pytest
import tokenizers
import torch
import transformers as tf

import kvlayers
import kvlayers_lab
import versions
from kvlayers import OptionError, PrefixStore
from kvlayers.generation.prefix_reuse.active_store import CURRENT
from kvlayers.generation.prefix_reuse.images import images_in_place
from kvlayers.upstream import compat
from matrix import once, some
from models import read, tokens_passed
from vision_models import CONFIGS, IMAGE, SEEING, SIDE, VOCAB, Piece, any_seeing_model, encoded, inputs, seeing_model

pytestmark = versions.images_in_prefixes

ROOM = 2**30
SNAPSHOT = 16
NEW = 5
OPTIONS: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}
NAMES = ("dynamic", "static", "offloaded")
SMALL, LARGE, WIDE = (4, 4), (8, 8), (4, 8)
DOCUMENT: list[int] = [3 + index % 80 for index in range(40)]


def plain(model: Any, given: dict[str, Any], **options: Any) -> Any:
    return model.generate(**given, **OPTIONS, **options)


def by_store(model: Any, store: PrefixStore, given: dict[str, Any], **options: Any) -> tuple[Any, int, list[int]]:
    """The output, the tokens that were passed to the decoder, and what was passed to the encoder."""
    with tokens_passed(model) as tokens, encoded(model) as images:
        output = kvlayers.generate(model, **given, prefix_store=store, **OPTIONS, **options)
    return output, sum(tokens), images


def assert_equal(seen: Any, expected: Any) -> None:
    assert torch.equal(seen.sequences, expected.sequences)
    torch.testing.assert_close(seen.logits, expected.logits, rtol=0, atol=1e-5)


def answer_in(output: Any) -> list[int]:
    """The answer to one prompt, as text. A random model writes placeholders, too."""
    return [token if token < VOCAB else 3 for token in output.sequences[0, -NEW:].tolist()]


def encoder_input(family: str, *grids: tuple[int, int]) -> int:
    """What the encoder gets for images with these grids."""
    return sum(high * wide for high, wide in grids) if family.startswith("qwen") else len(grids)


@pytest.mark.parametrize("family", CONFIGS)
def test_models_of_these_tests_see(family: str) -> None:
    model = any_seeing_model(family)
    one, other = (model(**inputs(family, [[5], (seed, WIDE), [8, 9]])).logits[0, -1] for seed in (1, 2))
    assert (one - other).abs().max() > 0.01


@pytest.mark.parametrize(("name", "family"), once(NAMES, SEEING))
def test_a_chat_pays_for_its_new_tokens_and_images_alone(name: str, family: str) -> None:
    model, store = seeing_model(family), PrefixStore(ROOM, snapshot_tokens=SNAPSHOT)
    pieces: list[Piece] = [[5, 6, 7], (1, WIDE), [8, 9, 10, 11]]
    asked: list[tuple[list[Piece], tuple[tuple[int, int], ...]]] = [
        ([[12, 13]], ()),
        ([[14], (2, LARGE), [15], (3, SMALL), [16]], (LARGE, SMALL)),
        ([[17, 18]], ()),
        ([[19]], ()),
    ]
    known, new = 0, (WIDE,)
    for more, grids in asked:
        given = inputs(family, pieces)
        seen, tokens, images = by_store(model, store, given, cache_implementation=name)
        assert_equal(seen, plain(model, given))
        length = given["input_ids"].shape[1]
        assert tokens <= length - known + NEW
        assert sum(images) == encoder_input(family, *new)
        answer = answer_in(seen)
        # As far as the answer is text. Its last token was not passed, and a window cannot be rolled back into it.
        same = _common(answer, seen.sequences[0, length:-1].tolist())
        known = length - 1 if family == "gemma3" else length + same
        pieces, new = [*pieces, answer, *more], grids
    assert (store.statistics.hits, store.statistics.misses, store.statistics.bypassed) == (3, 1, 0)


POOL = [(seed, grid) for seed in (1, 2, 3) for grid in (SMALL, (2, 8), (8, 2))]
"""Images of the same number of tokens; where there are no grids, three images."""


@pytest.mark.parametrize("family", SEEING)
def test_keys_of_200_prompts_are_equal_as_far_as_texts_and_images_are(family: str) -> None:
    draw, config, known = random.Random(5), seeing_model(family).config, []
    for _ in range(200):
        pieces: list[Piece] = [[draw.choice((5, 6))], draw.choice(POOL), draw.choice(([7], [8, 7], [8, 9]))]
        if draw.random() < 0.3:
            pieces += [draw.choice(POOL), [draw.choice((5, 6))]]
        of_images = iter(piece if family.startswith("qwen") else piece[0] for piece in pieces if type(piece) is tuple)
        given = inputs(family, pieces)
        del given["attention_mask"]
        ids = given.pop("input_ids")
        # What stands at each place: a token of text, or an image.
        own, places, last = None, [], 0
        for token in ids[0].tolist():
            own = next(of_images) if token == IMAGE != last else own
            places.append(own if token == IMAGE else token)
            last = token
        keys = images_in_place(config, ids, (0,), given).keys[0].tolist()
        assert all((key == token) == (token != IMAGE) for key, token in zip(keys, ids[0].tolist(), strict=True))
        for other_keys, other_places in known:
            assert _common(keys, other_keys) == _common(places, other_places)
        known.append((keys, places))


def _common(one: list[Any], other: list[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, pair in pairs if pair[0] != pair[1]), min(len(one), len(other)))


def changed(states: torch.Tensor, place: Any, by: float) -> torch.Tensor:
    states = states.clone()
    states[place] += by
    return states


DIFFERENCES: dict[str, tuple[str, str, Any]] = {
    "a pixel": ("llava", "pixel_values", lambda pixels: changed(pixels, (0,) * pixels.dim(), 1e-6)),
    "a patch": ("qwen3_vl", "pixel_values", lambda pixels: changed(pixels, (0,) * pixels.dim(), 1e-6)),
    "a grid": ("qwen2_5_vl", "image_grid_thw", lambda grid: grid[:, [0, 2, 1]]),
    "a mask of pixels": ("idefics3", "pixel_attention_mask", lambda mask: mask & (torch.arange(mask.shape[-1]) >= 8)),
    "the shape of an image": ("mllama", "aspect_ratio_ids", lambda ids: ids + 1),
    "which tokens see it": (
        "mllama",
        "cross_attention_mask",
        lambda mask: mask * (torch.arange(mask.shape[1]) >= 4)[:, None, None],
    ),
    "no types of tokens": ("gemma3", "token_type_ids", lambda types: None),
}


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_what_an_encoder_is_given_tells_images_apart(difference: str) -> None:
    family, name, change = DIFFERENCES[difference]
    model, store = seeing_model(family), PrefixStore(ROOM, snapshot_tokens=4)
    given = inputs(family, [[5, 6], (1, WIDE), [7, 8]])
    other = {**given, name: change(given[name])}
    before = int((given["input_ids"][0] == IMAGE).int().argmax())
    for _ in range(2):
        for each in (given, other):
            assert_equal(by_store(model, store, each)[0], plain(model, each))
    store.clear()
    by_store(model, store, given)
    assert by_store(model, store, other)[0].cached_tokens[0] <= before


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_are_those_of_the_prompts_own_images(family: str) -> None:
    """A model remembers how far the images of its last call moved positions, and threads share a model."""
    model = seeing_model(family)

    class Busy(PrefixStore):
        def lookup(self, *args: Any, **options: Any) -> Any:
            # As another thread may at this moment.
            with CURRENT.override(None):
                model.generate(**inputs(family, [[5, 6], (9, (2, 16)), [7]]), max_new_tokens=1)
            return super().lookup(*args, **options)

    store = Busy(ROOM)
    prompts: list[list[Piece]] = [
        [[5, 6], (1, LARGE), [7, 8]],
        [[5, 6, 7, 8, 9]],
        [[5, 6], (1, SMALL), [7, 8]],
        [[5, 6], (1, LARGE), [7, 8], (2, SMALL), [9]],
    ]
    for turn in range(2):
        for pieces in prompts:
            given = inputs(family, [*pieces, [10 + turn, 20]])
            assert_equal(by_store(model, store, given)[0], plain(model, given))
    assert store.statistics.hits == 7


BATCHES: dict[str, list[list[Piece]]] = {
    "images of their own": [[[5, 6, 7], (1, WIDE), [8, 9]], [[5, 6], (2, LARGE), [8], (3, SMALL), [9, 10]]],
    "one document": [[DOCUMENT, (1, WIDE), [8, 9]], [DOCUMENT, (1, WIDE), [10, 11]]],
    "one document, padded": [[DOCUMENT, (1, WIDE), [8, 9]], [DOCUMENT, (1, WIDE), [10, 11, 12, 13]]],
    "one document, other images": [[DOCUMENT, (1, WIDE), [8, 9]], [DOCUMENT, (2, WIDE), [8, 9]]],
    "other images, without a mask": [[DOCUMENT, (1, WIDE), [8, 9]], [DOCUMENT, (2, WIDE), [8, 9]]],
    "text beside an image": [[DOCUMENT, (1, WIDE), [8, 9]], [DOCUMENT, [10, 11, 12]]],
    "text": [[DOCUMENT, [8, 9]], [DOCUMENT, [10, 11, 12]]],
}


@pytest.mark.parametrize(("kind", "beams", "family"), once(BATCHES, (1, 3), SEEING))
def test_batches(kind: str, beams: int, family: str) -> None:
    model, store, given = seeing_model(family), PrefixStore(ROOM), inputs(family, *BATCHES[kind])
    tokens_given = given["attention_mask"].sum()
    if kind == "other images, without a mask":
        del given["attention_mask"]
    expected = plain(model, given, num_beams=beams)
    for attempt in range(2):
        seen, tokens, images = by_store(model, store, given, num_beams=beams)
        assert_equal(seen, expected)
        assert tokens <= 2 * beams * (NEW + 4) + (0 if attempt else tokens_given)
        assert attempt == 0 or images == []
    assert store.statistics.bypassed == 0


@pytest.mark.parametrize("family", some((*SEEING, "mllama"), ("qwen3_vl", "gemma3", "mllama")))
def test_images_are_found_in_files(family: str, tmp_path: pathlib.Path) -> None:
    model = seeing_model(family)
    with PrefixStore(ROOM, directory=tmp_path) as store:
        by_store(model, store, inputs(family, [DOCUMENT, (1, WIDE), [8, 9]]))
    for other in (1, 2):
        given = inputs(family, [DOCUMENT, (other, WIDE), [8, 9], [10, 11]])
        seen, _, images = by_store(model, PrefixStore(ROOM, directory=tmp_path), given)
        assert_equal(seen, plain(model, given))
        assert bool(images) == (other == 2)


def test_a_prefix_that_ends_within_an_image_is_left_before_it(tmp_path: pathlib.Path) -> None:
    """Files hold 256 tokens. Without the second one, the first ends within the image."""
    model, text = seeing_model("llava"), [3 + index % 80 for index in range(250)]
    given = inputs("llava", [text[:230], (1, WIDE), [5], (2, WIDE), [8, 9]])
    with PrefixStore(ROOM, directory=tmp_path) as store:
        by_store(model, store, given)
    files = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_size)
    files[0].unlink()
    seen, _, images = by_store(model, PrefixStore(ROOM, directory=tmp_path), given)
    assert_equal(seen, plain(model, given))
    assert (seen.cached_tokens, images) == ((247,), [1])


# Images whose states are apart from those of tokens


@pytest.mark.parametrize("name", ["dynamic", "offloaded", "int8"])
def test_layers_of_cross_attention_are_found_by_all_images(name: str) -> None:
    model, store = seeing_model("mllama"), PrefixStore(ROOM)
    first: list[Piece] = [[5, 6, 7], (1, WIDE), [8, 9, 10, 11]]
    turns: list[tuple[list[Piece], int, bool]] = [
        (first, 1, False),
        ([*first, [12, 13]], 1, True),
        # With another image, each token of the prompt has other states to attend to.
        ([*first, [12, 13], [14], (2, WIDE), [15]], 1, False),
        ([*first, [12, 13], [14], (2, WIDE), [15], [17, 18]], 2, True),
        ([first[0], (3, WIDE), first[2]], 1, False),
    ]
    for pieces, beams, is_found in turns:
        given = inputs("mllama", pieces)
        seen, tokens, images = by_store(model, store, given, cache_implementation=name, num_beams=beams)
        assert_equal(seen, plain(model, given, num_beams=beams))
        assert (bool(images), bool(seen.cached_tokens[0])) == (not is_found, is_found)
        assert beams > 1 or tokens == given["input_ids"].shape[1] - seen.cached_tokens[0] + NEW - 1


def test_tokens_without_the_states_of_their_images_are_computed_again() -> None:
    class Forgetful(PrefixStore):
        kept = 0

        def lookup(self, input_ids: torch.Tensor, *args: Any, **options: Any) -> Any:
            # As if the layers of images had been evicted, or part of their file was damaged.
            tokens = None if int(input_ids.min()) >= 0 else self.kept
            return kvlayers.prefix.Hit() if tokens == 0 else super().lookup(input_ids[:, :tokens], *args, **options)

    model, store, given = seeing_model("mllama"), Forgetful(ROOM), inputs("mllama", [[5, 6, 7], (1, WIDE), [8, 9]])
    for store.kept in (0, 0, 6):
        seen, _, images = by_store(model, store, given)
        assert_equal(seen, plain(model, given))
        assert images == [1]


def test_what_a_processor_returns_is_taken() -> None:
    image = pytest.importorskip("PIL.Image", reason="processors of images need pillow")
    words = ["<pad>", "<s>", "</s>", "<unk>", "what", "is", "this", "that"]
    vocabulary = {**{word: number for number, word in enumerate(words)}, "<image>": IMAGE}
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=splitter, pad_token="<pad>", extra_special_tokens={"image_token": "<image>"}
    )
    pixels = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    processor = tf.LlavaProcessor(
        tf.CLIPImageProcessor(**pixels), tokenizer, patch_size=4, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    model, store = seeing_model("llava"), PrefixStore(ROOM)
    for color, question, covered in (("red", "this", 0), ("red", "that", 18), ("blue", "that", 0)):
        photo = image.new("RGB", (20, 24), color)
        given = processor(images=photo, text=f"<image> what is {question}", return_tensors="pt")
        seen, _, images = by_store(model, store, given)
        assert_equal(seen, plain(model, given))
        assert (seen.cached_tokens, bool(images)) == ((covered,), covered == 0)


# Calls that cannot use a store


def without_between(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A prompt without the tokens between its two images."""
    of_images = given["token_type_ids"][0].cumsum(0)
    kept = (given["token_type_ids"][0] == 1) | (of_images == 0) | (of_images == of_images[-1])
    return {name: value[:, kept] if value.dim() == 2 else value for name, value in given.items()}


REFUSED: dict[str, tuple[str, str, Any]] = {
    "a token attends to those behind it": ("paligemma", "attend to those behind", dict),
    "an argument that is not known": ("llava", "image_sizes", lambda given: {**given, "image_sizes": [1]}),
    "too many placeholders": (
        "llava",
        "placeholders",
        lambda given: {
            **given,
            "input_ids": torch.cat([torch.tensor([[IMAGE]]), given["input_ids"]], dim=1),
            "attention_mask": torch.ones(1, given["input_ids"].shape[1] + 1),
        },
    ),
    "a list of images": ("llava", "not tensors", lambda given: {**given, "pixel_values": list(given["pixel_values"])}),
    "an image at the end": (
        "llava",
        "ends with an image",
        lambda given: {
            **given,
            "input_ids": given["input_ids"][:, :-2],
            "attention_mask": given["attention_mask"][:, :-2],
        },
    ),
    "patches that grids do not count": (
        "qwen3_vl",
        "numbers of patches",
        lambda given: {**given, "pixel_values": given["pixel_values"][4:]},
    ),
    "a mask that nobody reads": (
        "llava",
        "given pixel_attention_mask",
        lambda given: {**given, "pixel_attention_mask": torch.ones(2, SIDE, SIDE)},
    ),
    "images apart from several prompts": (
        "mllama",
        "several prompts",
        lambda given: {name: torch.cat([value, value]) for name, value in given.items()},
    ),
    "images apart beside padding": (
        "mllama",
        "is padded",
        lambda given: {
            **given,
            **{
                name: torch.cat([torch.zeros_like(given[name][:, :3]), given[name]], dim=1)
                for name in ("input_ids", "attention_mask", "cross_attention_mask")
            },
        },
    ),
    "images of zeros, which a model leaves out": (
        "idefics3",
        "another number of tokens",
        lambda given: {**given, "pixel_values": torch.zeros_like(given["pixel_values"])},
    ),
    "images side by side that attend to each other": ("gemma3", "side by side", lambda given: without_between(given)),
    "images apart without their shapes": (
        "mllama",
        "aspect_ratio_ids",
        lambda given: {name: value for name, value in given.items() if name != "aspect_ratio_ids"},
    ),
    "types that tell texts apart": (
        "gemma3",
        "token_type_ids",
        lambda given: {**given, "token_type_ids": torch.ones_like(given["token_type_ids"])},
    ),
    **{
        f"a cache that evicts: {name}": (
            "llava",
            "which tokens came with an image",
            lambda given, name=name: {**given, "cache_implementation": name},
        )
        for name in ("sink", "knorm", "snapkv")
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_calls_that_cannot_use_a_store_say_why(case: str) -> None:
    family, reason, change = REFUSED[case]
    model, store = seeing_model(family), PrefixStore(ROOM)
    images: list[Piece] = [(1, WIDE)] if family in ("paligemma", "mllama") else [(1, WIDE), [7], (2, WIDE)]
    given = change(inputs(family, [[5, 6], *images, [7, 8]]))
    with pytest.raises(OptionError, match=reason):
        kvlayers.generate(model, **given, prefix_store=store, **OPTIONS)


BYPASSED = (
    "paligemma",
    *(("gemma3",) if not compat.MASKS_IMAGES_BY_POSITION else ()),
    *(("mllama",) if compat.MASKS_BY_CACHE_POSITION else ()),
)


@pytest.mark.parametrize("family", BYPASSED)
def test_a_bypassed_call_answers_as_without_a_store(family: str) -> None:
    model, store, given = any_seeing_model(family), PrefixStore(ROOM), inputs(family, [[5, 6], (1, WIDE), [7, 8]])
    expected = plain(model, given)
    with kvlayers.installed(prefix_store=store):
        for _ in range(2):
            assert_equal(plain(model, given), expected)
    assert store.statistics.bypassed == 2


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_scores_do_not_depend_on_the_image_of_an_earlier_call(family: str) -> None:
    model, store, logprobs = seeing_model(family), PrefixStore(ROOM), list[float]()
    for seed in (1, None, 2):
        if seed is not None:
            plain(model, inputs(family, [[5, 6], (seed, WIDE), [7, 8]]))
        for each in (None, store, store):
            logprobs.append(kvlayers_lab.score(model, [DOCUMENT], [[[5, 6]]], prefix_store=each)[0][0].logprob)
    # In one pass that is told its positions.
    ids = torch.tensor([[*DOCUMENT, 5, 6]])
    logits = read(model, ids, position_ids=torch.arange(ids.shape[1])[None])[1][0].log_softmax(-1)
    assert logprobs == pytest.approx([float(logits[-3, 5] + logits[-2, 6])] * 9, abs=1e-5)
