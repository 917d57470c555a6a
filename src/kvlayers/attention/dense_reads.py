"""Notes that states are read in full precision, and warns if a model's attention does so at every step."""

from kvlayers.attention.dispatch import PathCounter
from kvlayers.upstream.deprecation import warn_the_caller
from kvlayers.upstream.generate_calls import running_attention_implementation

READ_AS_HELD = ("sdpa", "eager", "kvlayers")
"""The attention implementations that read codes, and a prefix that sequences share, as they are held."""

_warned: set[str] = set()


def note_dense_read(paths: PathCounter, path: str) -> None:
    """Count that states of a store are read in full precision.

    It warns once in a process for each `attn_implementation` of models that cannot do otherwise.

    Args:
        paths: the counts of the store.
        path: what reads the states, and why not as they are held.
    """
    if path not in paths.counts:
        name = running_attention_implementation()
        if name is not None and name not in (*READ_AS_HELD, *_warned):
            _warned.add(name)
            warn_the_caller(
                f"The attention {name!r} reads states in full precision only. So at every step each layer of this "
                "cache copies all of its states to full precision, which is slower than a DynamicCache and takes the "
                "memory of one layer's copy. Use model.set_attn_implementation('sdpa'), or 'kvlayers' after "
                "kvlayers.install(): both read the states as the cache holds them."
            )
    paths.record(path)
