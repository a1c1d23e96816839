"""Shared by tests of files: chunks of a checkpoint, JSON files changed with valid checksums."""

import copy
import json
import zlib

DEEP = '{"a":' * 100_000
TEXTS = {
    "deep": DEEP.encode(),
    "a list": b"[1]",
    "a string": b'"x"',
    "null": b"null",
    "nothing": b"",
    "a long number": b'{"format": 1' + b"0" * 10_000 + b"}",
    "infinity": b'{"format": 1e999}',
    "no text": b"\xff\xfe\x00",
    "twice": b'{"format": 3, "format": {}}',
}
"""What is no JSON file of ours."""


def chunks(directory):
    """Return the files of an array's chunks, sorted by name."""
    found = [path for path in directory.rglob("*") if path.is_file()]
    return sorted(path for path in found if path.name != "zarr.json")


def swap(first, second):
    """Exchange two files or directories."""
    third = first.with_name("third")
    for source, target in ((first, third), (second, first), (third, second)):
        source.rename(target)


def resigned(value):
    """Return a JSON object with the checksum that `schema.write_with_crc` would give it."""
    said = {key: part for key, part in value.items() if key != "crc32"}
    return said | {"crc32": zlib.crc32(json.dumps(said, sort_keys=True).encode())}


def rewrite(path, change):
    """Change the object of a JSON file in place, and give it a valid checksum."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(resigned(value)))


OTHERS = [None, True, False, -1, 0, 1.5, 2**70, "x", "4t,", "../../x", [], {}, [[[]]], [None]]
"""The values that replace a part."""


def mutations(value):
    """Yield (place, object): each part removed, or replaced by values of other types."""
    for place in _places({key: part for key, part in value.items() if key != "crc32"}):
        *to, last = place
        for other in OTHERS:
            changed = copy.deepcopy(value)
            inside = _inside(changed, to)
            if type(inside[last]) is not type(other) or other == 2**70:
                inside[last] = other
                yield (*place, other), changed
        changed = copy.deepcopy(value)
        del _inside(changed, to)[last]
        yield (*place, "gone"), changed


def _places(value, place=()):
    if place:
        yield place
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _places(value[key], (*place, key))


def _inside(value, place):
    for key in place:
        value = value[key]
    return value
