"""Images that do not stand in the sequence: layers of cross-attention hold their states, beside those of tokens.

A store compares tokens, and all layers of an entry have seen the same ones. So there are two entries, under a label
that follows from all images of a prompt: the layers of tokens, and the layers of images, which have seen -1, -2, -3 and
so on.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvlayers.core.cache import Cache
from kvlayers.generation.prefix_reuse.eligibility import IneligibleError, StorePart
from kvlayers.generation.prefix_reuse.images import digest_of
from kvlayers.persistence.fingerprint import model_fields
from kvlayers.prefix import Hit
from kvlayers.upstream import model_types

MASK = "cross_attention_mask"


class ImagesApart:
    """The images of one prompt.

    Args:
        config: config of the model.
        input_ids: the prompt, int64 `[1, tokens]`.
        given: arguments of the model with what it is given of its images, and which tokens attend to them.

    Attributes:
        keys: the prompt.

    Raises:
        IneligibleError: there are several prompts, or an argument is missing or not a tensor.
    """

    def __init__(self, config: Any, input_ids: Tensor, given: Mapping[str, Any]) -> None:
        if set(given) != model_types.FOR_IMAGES_APART or not all(isinstance(each, Tensor) for each in given.values()):
            raise IneligibleError(f"it is not given {', '.join(sorted(model_types.FOR_IMAGES_APART))}, as tensors")
        if len(input_ids) > 1 or input_ids.shape[1] == 1:
            raise IneligibleError("it has several prompts, or one of a single token, beside which there are images")
        self.keys = input_ids
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

    def boundary(self, row: int, length: int) -> int:
        """No length cuts an image."""
        return length

    def arguments(self, row: int, begin: int, stop: int) -> dict[str, Tensor]:
        """What a model is given for the tokens from `begin` to `stop`: the images with the first ones."""
        return {**(self._of_images if begin == 0 else {}), MASK: self._mask[:, :stop]}

    def lookup(self, part: StorePart, keys: Tensor) -> Hit:
        """The longest stored prefix of tokens, with the states of the images; nothing if these are not stored."""
        hit = part.lookup(keys, self._label)
        if hit.cache is None:
            return hit
        of_images = part.lookup(self._numbers(), self._label).cache
        if of_images is None or of_images.get_seq_length() < self._states:
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
