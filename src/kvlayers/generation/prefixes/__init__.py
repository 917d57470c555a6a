"""Generation that goes by a store of prefixes: which calls can, and what they look up and insert."""
