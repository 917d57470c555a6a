"""Everything that depends on the installed versions of transformers and torch."""
