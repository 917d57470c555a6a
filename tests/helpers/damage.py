"""Damage to the bytes of a file, drawn by hypothesis: mostly in its header."""

from hypothesis import strategies as st


def damaged(data: st.DataObject, whole: bytes) -> bytes:
    """A content of which some bytes are others, missing, added, or in each other's places."""
    content, header = bytearray(whole), 8 + int.from_bytes(whole[:8], "little")
    place = st.one_of(st.integers(0, header - 1), st.integers(0, len(whole) - 1))
    for _ in range(data.draw(st.integers(1, 3))):
        how = data.draw(st.sampled_from(["flip", "set", "cut", "drop", "insert", "swap"]))
        at, other = (min(data.draw(place), max(len(content) - 1, 0)) for _ in range(2))
        if how == "insert":
            content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        elif how in ("cut", "drop"):
            del content[at : len(content) if how == "cut" else at + data.draw(st.integers(1, 9))]
        elif how == "swap" and content:
            content[at], content[other] = content[other], content[at]
        elif content:
            flipped = content[at] ^ (1 << data.draw(st.integers(0, 7)))
            content[at] = flipped if how == "flip" else data.draw(st.integers(0, 255))
    return bytes(content)
