"""The laboratory of kvlayers: what people run to choose a cache. It stands upon the public names of kvlayers.

Where to look:

* how likely a model finds continuations, through any cache: `score()`.
* bits for the keys and values of each layer, within a budget: `calibrate()`.
* long-context tasks, also those of your own: `kvlayers_lab.tasks`.
* lm-evaluation-harness, with the model `kvlayers`: import `kvlayers_lab.evaluation.harness`.
* on the command line: `kvlayers bench`, `fidelity`, `calibrate` and `lm-eval`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
