"""Evictions while single tokens come, after fewer of them than usual: a shorter text then has as many evictions."""

import pytest

import eviction_oracle
from kvlayers.eviction import evicting_layer as evicting
from kvlayers.eviction import eviction_progress

STEP = 16


def shorten_steps(patch: pytest.MonkeyPatch) -> None:
    """Let a layer with a budget, and its oracle, evict whenever it holds `STEP` tokens more than its budget."""
    for module in (evicting, eviction_progress, eviction_oracle):
        patch.setattr(module, "STEP", STEP)
