"""Small helpers that know nothing of caches."""
