"""The commands of `kvlayers`, one file each, and what they share. They need typer and rich."""
