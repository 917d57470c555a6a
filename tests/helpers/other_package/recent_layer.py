"""A layer that forgets many tokens at once, and seldom."""

from torch import Tensor

import kvlayers


class RecentLayer(kvlayers.layers.TokenLayer):
    """Keeps up to `most` tokens. One more, and only the newest `kept` are left."""

    described = ("most", "kept")
    fidelity = "evicting"

    def __init__(self, most: int, kept: int = 4, store: kvlayers.stores.TokenStore | None = None) -> None:
        super().__init__(store)
        self.most, self.kept = most, kept
        self.record_past = False
        self._seen = self._evicted_at = 0

    def update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        tokens, past = self.store.validate(key_states, value_states), self.store.length
        if past + tokens <= self.most or self.record_past:
            attended = self.store.extend(key_states, value_states)
            self._seen += tokens
        else:
            attended = self.store.extend_and_evict(key_states, value_states, past, self.kept)
            self._seen = self._evicted_at = self._seen + tokens
        return attended

    def _evict(self) -> None:
        if self.store.length > self.most:
            self.store.drop_oldest(self.store.length - self.kept)
            self._evicted_at = self._seen

    @property
    def length(self) -> int:
        return self._seen

    @property
    def capacity(self) -> int | None:
        return None

    def mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.store.length + query_length, self._seen - self.store.length

    def activate_past_recording(self) -> None:
        self.record_past = True

    def deactivate_past_recording(self) -> None:
        self.record_past = False
        self._evict()

    def check_truncate(self, length: int) -> None:
        if not (length == 0 or self._evicted_at <= length <= self._seen):
            raise kvlayers.errors.RollbackError(
                f"`length` must be 0, or from {self._evicted_at} to {self._seen}, got {length}."
            )

    def truncate(self, length: int) -> None:
        self.check_truncate(length)
        self.store.truncate(self.store.length - (self._seen - length) if length else 0)
        self._seen, self._evicted_at = length, self._evicted_at if length else 0
        self._evict()

    def reset(self) -> None:
        super().reset()
        self._seen = self._evicted_at = 0

    def check_held(self, held: int, seen: int) -> None:
        if not min(seen, self.kept) <= held <= seen:
            raise kvlayers.errors.StateMismatchError(
                f"A state of {seen} tokens must hold the newest of them, got {held}."
            )

    def load_state(self, state: kvlayers.layers.LayerState) -> None:
        super().load_state(state)
        self._seen = state.length
        # What is held beyond the `kept` tokens that an eviction leaves came after it.
        self._evicted_at = self._seen - (self.store.length - self.kept) if self.store.length < self._seen else 0
