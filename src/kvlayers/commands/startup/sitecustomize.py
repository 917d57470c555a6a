"""What each Python process under `kvlayers run` does when it starts: it waits for transformers to install kvlayers.

A process that does not import transformers' models pays for no more than this file. Importing models takes kvlayers
along, once no module of transformers or of kvlayers is half imported: each of them imports others in a circle.
"""

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

ACTIONS = {
    "install": {"transformers.modeling_utils", "transformers.generation.utils"},
    "change_the_server": {"transformers.cli.serving.server"},
}
"""Functions of `kvlayers.commands.running`, each with the modules whose classes and functions it changes."""


class _Watcher:
    """Finds modules as if it were not there, and calls kvlayers when those that it waits for have been imported."""

    def __init__(self) -> None:
        self._half_imported: set[str] = set()
        self._imported: set[str] = set()
        self._left = dict(ACTIONS)
        self._is_acting = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec that the other finders have of a module."""
        if name.partition(".")[0] not in ("transformers", "kvlayers"):
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for each in finders if (found := each.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            self._watch(name, spec.loader)
        return spec

    def _watch(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            self._half_imported.add(name)
            try:
                execute(module)
                self._imported.add(name)
            finally:
                self._half_imported.discard(name)
            if not self._half_imported and not self._is_acting:
                self._is_acting = True
                try:
                    self._act()
                finally:
                    self._is_acting = False

        loader.exec_module = exec_module

    def _act(self) -> None:
        try:
            for action, modules in list(self._left.items()):
                if modules <= self._imported:
                    del self._left[action]
                    from kvlayers.commands import running

                    getattr(running, action)()
        # The program goes on, whatever is wrong with kvlayers in its environment.
        except Exception as error:
            self._left.clear()
            print(f"kvlayers run: this process goes on without kvlayers: {error}", file=sys.stderr)


def _run_the_next_one(here: str) -> None:
    """Run the module of this name that Python would have found without this directory."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != here])
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Watcher())
    _run_the_next_one(os.path.dirname(os.path.abspath(__file__)))
