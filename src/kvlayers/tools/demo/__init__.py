"""The demo: a real model continues real text through every cache, beside transformers' own."""
