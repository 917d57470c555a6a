"""The names that transformers and older code have for the members of a layer's contract, derived from it once."""

from kvlayers.layers.arguments import BatchIndices, as_batch_indices, crop_target, repeated_rows, unbounded_as_minus_one
from kvlayers.layers.operations import LayerOperations


class TransformersNames(LayerOperations):
    """The part of the interface of kvlayers' layers that is not their own contract."""

    def get_max_length(self) -> int:
        """As `capacity`, with -1 for no maximum."""
        return unbounded_as_minus_one(self.capacity)

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` before transformers 5.13."""
        return self.get_max_length()

    def crop(self, tokens: int) -> None:
        """Roll back, exactly: keep `tokens` tokens if the number is positive, else remove the newest `-tokens` tokens.

        Raises:
            RollbackError: see `check_truncate`.
        """
        length = crop_target(tokens, self.length or 0)
        self.check_truncate(length)
        self.truncate(length)

    def reorder_cache(self, beam_idx: BatchIndices) -> None:
        """As `batch_select_indices`, by the name that beam search uses."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: BatchIndices) -> None:
        """Keep the sequences at `indices`, in that order. An index may occur more than once."""
        if self.batch_size is not None:
            self.select(as_batch_indices(indices, self.batch_size))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times in a row."""
        if self.batch_size is not None:
            self.select(repeated_rows(repeats, self.batch_size))
