"""What the demo's model is called. Imports nothing, as `--help` names it."""

NAME = "SmolLM2-135M-Instruct"
HUB_NAME = f"HuggingFaceTB/{NAME}"
