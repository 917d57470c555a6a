"""What replaces methods of transformers while kvlayers is installed: one file for each class that is patched."""
