"""All that depends on the installed versions of transformers and torch, or on the type of a model."""
