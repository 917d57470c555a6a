"""Run by `test_import.py`: prints as JSON which modules each step imports that were not there before it.

One process forks for what must begin anew, as torch and transformers take seconds to import.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable


def imports_of(step: Callable[[], object]) -> list[str]:
    """The modules that a step imports."""
    before = set(sys.modules)
    step()
    return sorted(set(sys.modules) - before)


def apart(step: Callable[[], object]) -> list[str] | str:
    """The modules that a step imports in a process that only it is in; the traceback where it fails."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            found: list[str] | str = imports_of(step)
        except BaseException:
            found = traceback.format_exc()
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = json.load(pipe)
    os.waitpid(child, 0)
    return found


def import_kvlayers() -> None:
    import kvlayers  # noqa: F401


def import_the_command() -> None:
    import kvlayers.__main__  # noqa: F401


def make_a_cache() -> None:
    from kvlayers import DynamicCache

    DynamicCache()


def import_names(names: tuple[str, ...]) -> None:
    import kvlayers

    for name in names:
        getattr(kvlayers, name)


def main() -> None:
    import transformers  # noqa: F401

    found: dict[str, object] = {"kvlayers": imports_of(import_kvlayers)}
    from transformers import Cache  # noqa: F401

    import kvlayers

    found["the command"] = apart(import_the_command)
    found["a cache"] = apart(make_a_cache)
    found["errors"] = apart(lambda: kvlayers.errors.CapacityError)
    from transformers import GenerationMixin  # noqa: F401

    found["all"] = imports_of(lambda: import_names(tuple(kvlayers.__all__)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
