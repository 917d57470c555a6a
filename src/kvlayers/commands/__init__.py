"""The commands `plan`, `inspect`, `compile` and `run`, and what commands of other packages share with them."""
