"""Names for caches, and generate() made to know them."""
