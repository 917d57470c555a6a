"""How attention reads what a layer returns."""
