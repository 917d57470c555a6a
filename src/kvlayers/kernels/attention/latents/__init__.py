"""Multi-head latent attention (MLA; DeepSeek-AI 2024, arXiv:2405.04434) over a cache of latents.

A model caches a latent for each token, and one rotated key that all heads share. transformers expands the latents of
the whole history to the keys and values of all heads at every step. Here the expansion waits until something reads it.
If attention does, the projection is absorbed into the query and into the result, and only the latents are read.
"""
