"""Tiny random models that see images, and what their processors would return for prompts with images."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers as tf
from torch.nn.utils.rnn import pad_sequence

import versions
from kvlayers.upstream import compat
from models import COMMON, WINDOW, with_larger_weights

SIDE = 16
"""Height and width of an image in pixels. Images of models with grids may have others."""

IMAGE = 96
"""Id of the placeholder of images."""

VOCAB = 90
"""Ids of text are smaller."""

TEXT = {**COMMON, "vocab_size": 97}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": 4,
}
GRIDS = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
MROPE = versions.rope(rope_type="default", mrope_section=[2, 1, 1], rope_theta=10000.0)
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": versions.NO_END}

CONFIGS: dict[str, Any] = {
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLConfig(
        text_config={**TEXT, **MROPE},
        vision_config={
            **GRIDS, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE, video_token_id=95, vision_start_token_id=93, vision_end_token_id=94,
    ),
    "qwen3_vl": lambda: tf.Qwen3VLConfig(
        text_config={**TEXT, **MROPE},
        vision_config={
            **GRIDS, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=IMAGE, video_token_id=95, vision_start_token_id=93, vision_end_token_id=94,
    ),
    "gemma3": lambda: tf.Gemma3Config(
        text_config={
            **TEXT, "num_hidden_layers": 3, "sliding_window": WINDOW, "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
        image_token_index=IMAGE, boi_token_index=93, eoi_token_index=94, mm_tokens_per_image=16,
    ),
    "llava": lambda: tf.LlavaConfig(
        text_config=tf.LlamaConfig(**TEXT), vision_config=tf.CLIPVisionConfig(**VISION, projection_dim=16),
        image_token_index=IMAGE, image_seq_length=16,
    ),
    "idefics3": lambda: tf.Idefics3Config(
        text_config=tf.LlamaConfig(**TEXT), vision_config=VISION, image_token_id=IMAGE, scale_factor=2,
    ),
    "paligemma": lambda: tf.PaliGemmaConfig(
        text_config={**TEXT, "model_type": "gemma"},
        vision_config={**VISION, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32},
        image_token_index=IMAGE, projection_dim=32, hidden_size=32,
    ),
    "mllama": lambda: tf.MllamaConfig(
        text_config={
            **{name: value for name, value in TEXT.items() if name != "head_dim"}, "num_hidden_layers": 4,
            "cross_attention_layers": [1, 3], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_global_layers": 1,
            "attention_heads": 2, "image_size": SIDE, "patch_size": 4, "max_num_tiles": 2,
            "intermediate_layers_indices": [0], "vision_output_dim": 32, "supported_aspect_ratios": [[1, 1], [1, 2]],
        },
        image_token_index=IMAGE,
    ),
}  # fmt: skip

SEEING = ("qwen2_5_vl", "qwen3_vl", "gemma3", "llava", "idefics3")
"""Families whose images a store takes."""

TOKENS = {"gemma3": 16, "llava": 16, "idefics3": 4, "paligemma": 16, "mllama": 1}
"""Placeholders of an image, where all images have the same number."""


def seeing_model(family: str) -> Any:
    """A random model of a family whose images a store takes, or of one whose images it never takes."""
    if family == "gemma3":
        versions.need_since("5.23", "masks for an image behind cached tokens")
    elif family == "mllama":
        versions.need_since("5.4", "masks of images by tokens")
    return any_seeing_model(family)


def any_seeing_model(family: str) -> Any:
    """A random model of a family, the same in every test."""
    model = _shared_model(family)
    vars(model).pop("forward", None)
    return model


@functools.cache
def _shared_model(family: str) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[family]()
    config.update(SPECIAL)
    model = tf.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.any() and not name.endswith("bias"):
                # What would be learned before an image has an effect: projections, and gates of cross-attention.
                weight.normal_(std=0.5)
    with_larger_weights(model)
    for name, value in SPECIAL.items():
        setattr(model.generation_config, name, value)
    return model


def image(family: str, seed: int, grid: tuple[int, int] = (4, 8)) -> torch.Tensor:
    """A random image: patches `[patches, channels * pixels]` of a model with grids, `[channels, height, width]` else.

    Args:
        family: the family.
        seed: another number is another image.
        grid: patches of a model with grids, vertically and horizontally.
    """
    random = torch.Generator().manual_seed(seed)
    if family.startswith("qwen"):
        return torch.randn((grid[0] * grid[1], 3 * 2 * 4 * 4), generator=random)
    return torch.randn((3, SIDE, SIDE), generator=random)


Piece = list[int] | tuple[int, tuple[int, int]]
"""What a prompt consists of: ids of text, or the seed and the grid of an image."""


def _ids_of(family: str, piece: Piece) -> list[int]:
    """The ids of a text, or the placeholders of an image, most models' with a token on both sides."""
    if isinstance(piece, list):
        return piece
    rows, columns = piece[1]
    placeholders = [IMAGE] * (rows * columns // 4 if family.startswith("qwen") else TOKENS[family])
    return placeholders if family in ("llava", "paligemma", "mllama") else [93, *placeholders, 94]


def inputs(family: str, *prompts: Sequence[Piece], length: int | None = None) -> dict[str, torch.Tensor]:
    """What a processor returns for prompts, padded on the left.

    Args:
        family: the family.
        prompts: pieces of each.
        length: tokens, padding included. Default: those of the longest prompt.
    """
    rows = [[token for piece in prompt for token in _ids_of(family, piece)] for prompt in prompts]
    seen = [[piece for piece in prompt if isinstance(piece, tuple)] for prompt in prompts]
    of_rows = [[image(family, *piece) for piece in pieces] for pieces in seen]
    pixels = [each for own in of_rows for each in own]
    longest = max(map(len, rows)) if length is None else length
    input_ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    made = {"input_ids": input_ids, "attention_mask": mask}
    types = (input_ids == IMAGE).long()
    if family.startswith("qwen") and compat.PREPARES_POSITIONS:
        made["mm_token_type_ids"] = types
    elif family == "gemma3":
        made["token_type_ids"] = types
    elif family == "paligemma":
        made["token_type_ids"] = torch.zeros_like(types)
    if not pixels:
        return made
    if family.startswith("qwen"):
        grids = [[1, *grid] for pieces in seen for _, grid in pieces]
        made |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    elif family == "idefics3":
        none = torch.empty(0, 3, SIDE, SIDE)
        padded = pad_sequence([torch.stack(own) if own else none for own in of_rows], batch_first=True)
        shown = torch.ones(*padded.shape[:2], SIDE, SIDE, dtype=torch.bool)
        made |= {"pixel_values": padded, "pixel_attention_mask": shown}
    elif family == "mllama":
        made |= {
            "pixel_values": torch.stack([torch.stack([each, torch.zeros_like(each)]) for each in pixels])[None],
            "aspect_ratio_ids": torch.ones(1, len(pixels)).long(),
            "aspect_ratio_mask": torch.tensor([[[1, 0]] * len(pixels)]),
            "cross_attention_mask": torch.tensor([1, 0]).expand(1, longest, len(pixels), 2).clone(),
        }
    else:
        made["pixel_values"] = torch.stack(pixels)
    return made


@contextmanager
def encoded(model: Any) -> Iterator[list[int]]:
    """What each call of the encoder of a model gets: how many images; of models with grids, patches."""
    counts: list[int] = []
    names = ("visual", "vision_tower", "vision_model")
    encoder = type(next(module for name, module in model.model.named_children() if name in names))
    original = encoder.forward

    # Not by a hook of the module, on which states may depend.
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts.append(len(kwargs.get("pixel_values", args[0] if args else kwargs.get("hidden_states"))))
        return original(self, *args, **kwargs)

    encoder.forward = forward
    try:
        yield counts
    finally:
        encoder.forward = original
