"""What other code expects: transformers' own layers in a cache, its former class names, and `torch.export`."""

from kvlayers.interop import adapter, aliases, export

__all__ = ["adapter", "aliases", "export"]
