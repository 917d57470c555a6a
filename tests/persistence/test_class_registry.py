"""The registries of classes: names in files, threads, entry points of other packages."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvlayers.utils.registry import ClassRegistry, DescribesItself


class Thing(DescribesItself):
    pass


def _things() -> ClassRegistry[Any]:
    return ClassRegistry("thing", "kvlayers.things_of_tests", "unregister_thing", Thing)


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_that_register_and_unregister_lose_no_name(frequent_switches: None) -> None:
    things, errors = _things(), []
    for number in range(200):
        things.register(type(f"Other{number}", (Thing,), {}))

    def change(thread: int) -> None:
        try:
            for turn in range(100):
                kept, dropped = (type(f"{word}_{thread}_{turn}", (Thing,), {}) for word in ("Kept", "Dropped"))
                things.register(kept)
                things.register(dropped)
                assert things.remove(dropped.__name__)
                assert things.name_of(kept) == kept.__name__
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=change, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert all(things.name_of(things.get(name)) == name for name in things.names())
