"""What other code expects: transformers' own layers in a cache, its former class names, and `torch.export`."""
