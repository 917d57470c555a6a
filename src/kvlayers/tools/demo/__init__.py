"""The demo: a real model continues real text through the caches of kvlayers and of transformers."""
