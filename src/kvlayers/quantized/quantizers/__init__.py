"""Quantizers, each in a file that registers it. What one implements is in `kernels/codes/quantizer_contract.py`."""

import importlib
import pkgutil

# Whoever adds a file need not name it here.
for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
