"""Layers of linear attention, state spaces and short convolutions: a state of fixed size instead of tokens."""
