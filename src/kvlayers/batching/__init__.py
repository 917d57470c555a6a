"""Many requests through a few rows: a call of Python, or transformers' continuous batching."""
