"""Generation that steps down to a smaller cache when memory runs out."""
