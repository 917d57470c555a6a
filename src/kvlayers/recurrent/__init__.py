"""States of a fixed size, of Mamba and linear attention, alone or beside attention."""

from kvlayers.recurrent import hybrid_layer, linear_layer

__all__ = ["hybrid_layer", "linear_layer"]
