"""The commands of `kvlayers`, one file each. Nothing else imports them, as they need typer and rich."""
