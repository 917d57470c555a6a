"""Attention to states as they are held: in full precision, in codes, or in segments that forks share."""
