"""Keeps the first tokens and a window, with keys that are rotated to new positions (StreamingLLM)."""
