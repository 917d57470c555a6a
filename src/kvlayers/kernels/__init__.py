"""Attention to states as they are held, and the packing of states: tensors in, tensors out, and no cache."""
