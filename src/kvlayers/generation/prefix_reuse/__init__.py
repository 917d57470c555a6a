"""Generation with a prefix store: which calls can use one, what they look up, and what they insert."""
