"""Images in prompts: by which tokens a store knows them, and what a model is given for some of them.

A store compares tokens. For it, the placeholders of an image are replaced by numbers that follow from what the encoder
is given. They are negative, so they are never those of text, and another image has others.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.generation.prefix_reuse.eligibility import IneligibleError, StorePart
from kvlayers.persistence.fingerprint import model_fields
from kvlayers.persistence.format import canonical
from kvlayers.prefix import Hit
from kvlayers.upstream import model_types

LEAST_TOKENS = 4
"""Tokens of an image that together have all bits of its digest, 64 in each."""


@dataclass(frozen=True)
class Image:
    """An image of a prompt, or one of the pieces into which a processor has cut it.

    Attributes:
        row: the prompt.
        start: position of its first token in the prompt, padding not counted.
        stop: position behind its last token.
        arguments: what the model is given of it.
    """

    row: int
    start: int
    stop: int
    arguments: Mapping[str, Tensor]


class Images:
    """The images of a batch of prompts.

    Args:
        images: the images, in the order of their tokens.
        keys: int64 `[rows, tokens]`, the ids of the prompts, with other numbers for the placeholders of images.
        of_tokens: arguments of the model that have one entry for each token, `[rows, tokens]`.
        padding: tokens of padding before each prompt.

    Attributes:
        keys: as passed.
    """

    def __init__(
        self, images: list[Image], keys: Tensor, of_tokens: Mapping[str, Tensor], padding: tuple[int, ...]
    ) -> None:
        self._images, self.keys, self._of_tokens, self._padding = images, keys, of_tokens, padding

    def end(self, row: int) -> int:
        """Position behind the last image of a prompt; 0 without images."""
        return max((image.stop for image in self._images if image.row == row), default=0)

    def boundary(self, row: int, length: int) -> int:
        """The greatest length, at most `length`, at which no image of a prompt is cut."""
        inside = [each.start for each in self._images if each.row == row and each.start < length < each.stop]
        return inside[0] if inside else length

    def lookup(self, part: StorePart, keys: Tensor) -> Hit:
        """The longest stored prefix of `keys`, without the last one."""
        return part.lookup(keys)

    def insert(self, part: StorePart, keys: Tensor, cache: Cache) -> None:
        """Insert a cache for the tokens that it has seen."""
        part.insert(keys, cache)

    def arguments(self, row: int, begin: int, stop: int) -> dict[str, Tensor]:
        """What a model is given for the tokens of a prompt from `begin` to `stop`, which cut no image, if any is there.

        Arguments with an entry for each token have all entries up to `stop`.
        """
        parts = [each.arguments for each in self._images if each.row == row and begin <= each.start < stop]
        if not parts:
            return {}
        padding = self._padding[row]
        of_tokens = {name: value[row : row + 1, padding : padding + stop] for name, value in self._of_tokens.items()}
        # Where rows have images of their own, [rows, images, channels, height, width], there is one row.
        dim = 1 if parts[0]["pixel_values"].dim() == 5 else 0
        return {**{name: torch.cat([part[name] for part in parts], dim) for name in parts[0]}, **of_tokens}


def images_in_place(config: Any, input_ids: Tensor, padding: tuple[int, ...], given: Mapping[str, Any]) -> Images:
    """The images of a call of `generate()` whose tokens stand in the sequence.

    Args:
        config: config of the model.
        input_ids: int64 `[rows, tokens]`.
        padding: tokens of padding before each prompt.
        given: arguments of the model about images.

    Raises:
        IneligibleError: it is not clear which tokens belong to which image.
    """
    if not given:
        return Images([], input_ids, {}, padding)
    if not all(isinstance(value, Tensor) for value in given.values()):
        raise IneligibleError("what it is given of its images are not tensors")
    of_tokens = {name: given[name] for name in sorted(given) if name in model_types.TOKEN_TYPES}
    of_images = {name: given[name] for name in sorted(given) if name not in model_types.TOKEN_TYPES}
    is_image = input_ids == config.image_token_id
    # Without images, an id of a placeholder is text.
    if of_images and any(not torch.equal(types.to(is_image), is_image) for types in of_tokens.values()):
        raise IneligibleError(f"{', '.join(of_tokens)} differ from where its images are")
    if not of_images and any(bool(types.any()) for types in of_tokens.values()):
        raise IneligibleError(f"{', '.join(of_tokens)} tell tokens of text apart")
    parts = _parts(of_images) if of_images else []
    if parts and parts[0].keys() != of_images.keys():
        raise IneligibleError(f"it is given {', '.join(sorted(of_images.keys() - parts[0].keys()))} of its images")
    rows, columns = (each.tolist() for each in is_image.nonzero(as_tuple=True))
    # As many as its grid has cells, or all images the same number.
    counts = [
        int(part["image_grid_thw"].prod()) // config.vision_config.spatial_merge_size**2
        if "image_grid_thw" in part
        else len(rows) // len(parts)
        for part in parts
    ]
    if of_images and sum(counts) != len(rows):
        raise IneligibleError("its images have another number of tokens than its prompts have placeholders")
    if any(count < LEAST_TOKENS for count in counts):
        raise IneligibleError(f"an image has fewer than {LEAST_TOKENS} tokens")
    # States depend on the encoder's config, and on whether the model is told which tokens are placeholders.
    common = [model_fields(config, is_pair=True), sorted(of_tokens)]
    images: list[Image] = []
    keys, first = input_ids.cpu().clone(), 0
    for part, count in zip(parts, counts, strict=True):
        row, start, stop = rows[first], columns[first], columns[first + count - 1] + 1
        if rows[first + count - 1] != row:
            raise IneligibleError("an image begins in one prompt and ends in another")
        before = images[-1] if images and images[-1].row == row else None
        if config.model_type in model_types.ATTENDS_WITHIN_IMAGES and before and before.stop == start - padding[row]:
            raise IneligibleError("two images stand side by side, which attend to each other")
        if stop == input_ids.shape[1]:
            raise IneligibleError("a prompt ends with an image")
        images.append(Image(row, start - padding[row], stop - padding[row], part))
        keys[row, columns[first : first + count]] = _numbers(digest_of(common, part), count)
        first += count
    return Images(images, keys.to(input_ids.device), of_tokens, padding)


def _parts(of_images: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """What a model is given of each image, in the order of the images."""
    pixels, grid = of_images.get("pixel_values"), of_images.get("image_grid_thw")
    if pixels is None:
        raise IneligibleError(f"it is given {', '.join(of_images)} without pixel_values")
    if grid is not None:
        if int(grid.prod(-1).sum()) != len(pixels):
            raise IneligibleError("its images have other numbers of patches than their grids say")
        # Patches of all images, [patches, channels * pixels].
        pieces = zip(torch.split(pixels, grid.prod(-1).tolist()), grid, strict=True)
        return [{"pixel_values": own, "image_grid_thw": own_grid[None]} for own, own_grid in pieces]
    if pixels.dim() == 4:
        # [images, channels, height, width]
        return [{"pixel_values": own} for own in torch.split(pixels, 1)]
    if pixels.dim() != 5:
        raise IneligibleError(f"its pixel_values have {pixels.dim()} dimensions")
    # [rows, images, channels, height, width]: the model leaves out images of zeros, with which rows are padded.
    return [
        {name: value[row : row + 1, number : number + 1] for name, value in of_images.items()}
        for row, number in pixels.ne(0).flatten(2).any(-1).nonzero().tolist()
    ]


def digest_of(facts: Any, tensors: Mapping[str, Tensor]) -> bytes:
    """32 bytes that differ if plain facts or tensors do."""
    total = hashlib.sha256(canonical(facts).encode())
    for name, value in sorted(tensors.items()):
        total.update(f"\n{name} {value.dtype} {list(value.shape)} ".encode())
        total.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.digest()


def _numbers(digest: bytes, count: int) -> Tensor:
    """So many negative numbers that follow from a digest, four of which have nearly all of its bits."""
    words = np.frombuffer(digest, "<i8").astype(np.int64) | np.int64(-(2**63))
    return torch.from_numpy(np.resize(words, count))


MASK = "cross_attention_mask"


class ImagesApart(Images):
    """Images that do not stand in the sequence: layers of cross-attention hold their states, beside those of tokens.

    A store compares tokens, and all layers of an entry have seen the same ones. So there are two entries, under a label
    that follows from all images of a prompt: the layers of tokens, and the layers of images, which have seen -1, -2, -3
    and so on.

    Args:
        config: config of the model.
        input_ids: the prompt, int64 `[1, tokens]`.
        given: arguments of the model with what it is given of its images, and which tokens attend to them.

    Raises:
        IneligibleError: there are several prompts, or an argument is missing or not a tensor.
    """

    def __init__(self, config: Any, input_ids: Tensor, given: Mapping[str, Any]) -> None:
        if set(given) != model_types.FOR_IMAGES_APART or not all(isinstance(each, Tensor) for each in given.values()):
            raise IneligibleError(f"it is not given {', '.join(sorted(model_types.FOR_IMAGES_APART))}, as tensors")
        if len(input_ids) > 1 or input_ids.shape[1] == 1:
            raise IneligibleError("it has several prompts, or one of a single token, beside which there are images")
        # None of them stands in the sequence, so no length cuts one.
        super().__init__([], input_ids, {}, (0,))
        self._mask: Tensor = given[MASK]
        self._of_images = {name: value for name, value in given.items() if name != MASK}
        self._layers = sorted(model_types.decoder_config(config).cross_attention_layers)
        # As a turn of a chat, a longer prompt goes on with the last row of the mask.
        rows, counts = torch.unique_consecutive(self._mask[0], dim=0, return_counts=True)
        seen = {**self._of_images, "rows": rows, "counts": counts[:-1]}
        self._label = f" images {digest_of(model_fields(config, is_pair=True), seen).hex()}"
        tiles, vision = given["pixel_values"].flatten(0, 2).shape[0], config.vision_config
        self._states = tiles * ((vision.image_size // vision.patch_size) ** 2 + 1)

    def end(self, row: int) -> int:
        """How many tokens are to be passed at first, together with the images."""
        return 1

    def arguments(self, row: int, begin: int, stop: int) -> dict[str, Tensor]:
        """What a model is given for the tokens from `begin` to `stop`: the images with the first ones."""
        return {**(self._of_images if begin == 0 else {}), MASK: self._mask[:, :stop]}

    def lookup(self, part: StorePart, keys: Tensor) -> Hit:
        """The longest stored prefix of tokens, with the states of the images; nothing if these are not stored."""
        hit = part.lookup(keys, self._label)
        if hit.cache is None:
            return hit
        of_images = part.lookup(self._numbers(), self._label).cache
        if of_images is None or of_images.length < self._states:
            return Hit(reason="the states of its images are not stored")
        for place, layer in zip(self._layers, of_images.layers, strict=True):
            hit.cache.layers[place] = layer
        return hit

    def insert(self, part: StorePart, keys: Tensor, cache: Cache) -> None:
        """Insert the layers of tokens and those of images."""
        of_tokens = cache.fork()
        of_images = Cache([of_tokens.layers[place].fork() for place in self._layers])
        for place in self._layers:
            of_tokens.layers[place].reset()
        part.insert(self._numbers(), of_images, self._label)
        part.insert(keys, of_tokens, self._label)

    def _numbers(self) -> Tensor:
        """What the layers of images have seen, and one more, `[1, states + 1]`."""
        return -torch.arange(1, self._states + 2)[None]
