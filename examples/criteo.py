"""Criteo click logs: convert the text files to binary files that `dlrm_data.Stored` can map.

A line is a label, 13 integers and 26 hexadecimal ids, separated by tabs; any of the last 39 may be
empty. One process reads some ten thousand lines per second. To convert two days:

    python examples/criteo.py --out criteo_bin day_0.gz day_1.gz
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import itertools
import json
import re
import runpy
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from dlrm_data import COLUMNS, DENSE, META, TABLES, Examples

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "dlrm_dcnv2.py"
LABEL, INTEGER, HEXADECIMAL = rb"[01]", rb"(?:-?[0-9]{1,18})?", rb"(?:[0-9a-fA-F]{1,16})?"
FIELDS = [LABEL] + [INTEGER] * DENSE + [HEXADECIMAL] * TABLES
LINE = re.compile(rb"\t".join(FIELDS))
KINDS = {
    LABEL: "the label, 0 or 1",
    INTEGER: "an integer of 18 digits at most, or nothing",
    HEXADECIMAL: "hexadecimal digits, 16 at most, or nothing",
}


def read(path: Path, rows: Sequence[int], *, lines: int = 16_384) -> Iterator[Examples]:
    """Yield the examples of one file (plain or gzip), `lines` examples at a time.

    - label: float32, 0 or 1.
    - dense: log(x + 1), where a missing or negative x counts as 0.
    - ids: the hexadecimal number mod V of its table; a missing number counts as 0.

    Raises:
      ValueError: a line is malformed, the gzip data is cut short, or the file is empty; the message
        names file and line.
    """
    start, modulus = 0, np.array(rows, np.uint64)
    with _opened(path) as file:
        while block := _block(path, file, start, lines):
            yield _parsed(path, block, start, modulus)
            start += len(block)
    if not start:
        raise ValueError(f"{path}:1: expected lines, got an empty file")


def _opened(path: Path) -> gzip.GzipFile | BinaryIO:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if packed else path.open("rb")


def _block(path: Path, file: Iterable[bytes], start: int, lines: int) -> list[bytes]:
    block = []
    try:
        for line in itertools.islice(file, lines):
            block.append(line.rstrip(b"\r\n"))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        where = f"{path}:{start + len(block) + 1}"
        raise ValueError(f"{where}: expected whole gzip data, got: {error}") from error
    return block


def _parsed(path: Path, block: list[bytes], start: int, modulus: np.ndarray) -> Examples:
    for number, line in enumerate(block, start + 1):
        if not LINE.fullmatch(line):
            raise ValueError(f"{path}:{number}: {_fault(line)}")
    # B lines of 40 fields -> 40 columns of B fields: the label, 13 integers, 26 ids
    columns = list(zip(*(line.split(b"\t") for line in block), strict=True))
    label = np.array(columns[0], dtype=np.float32)
    integers = [[int(x or 0) for x in column] for column in columns[1 : 1 + DENSE]]
    numbers = [[int(x or b"0", 16) for x in column] for column in columns[1 + DENSE :]]
    dense = np.log1p(np.maximum(np.array(integers, np.int64), 0).T.astype(np.float32))
    ids = (np.array(numbers, np.uint64).T % modulus).astype(np.int32)
    return Examples(label, np.ascontiguousarray(dense), np.ascontiguousarray(ids))


def _fault(line: bytes) -> str:
    """Return what is wrong with a line."""
    fields = line.split(b"\t")
    if len(fields) != len(FIELDS):
        return f"expected {len(FIELDS)} fields separated by tabs, got {len(fields)}"
    pairs = enumerate(zip(FIELDS, fields, strict=True), 1)
    number, (pattern, field) = next(p for p in pairs if not re.fullmatch(*p[1]))
    return f"field {number}: expected {KINDS[pattern]}, got {field[:40]!r}"


def convert(paths: Iterable[Path], directory: Path, rows: Sequence[int]) -> int:
    """Write the examples of these files, one after the other, and return their number.

    The files are `label.bin` (uint8), `dense.bin` (float32) and `ids.bin` (int32), little-endian.
    `meta.json` is written last; without it `Stored.open` refuses the others, so an interrupted
    conversion is never read. One block of lines is held in memory at a time.

    Raises:
      ValueError: there are no files, one is missing or would be overwritten, or `read` refuses one.
    """
    paths = list(paths)
    _check(paths, directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / META).unlink(missing_ok=True)
    count = 0
    with contextlib.ExitStack() as stack:
        files = {n: stack.enter_context((directory / f"{n}.bin").open("wb")) for n in COLUMNS}
        for examples in itertools.chain.from_iterable(read(path, rows) for path in paths):
            for name, (dtype, _) in COLUMNS.items():
                getattr(examples, name).astype(dtype).tofile(files[name])
            count += len(examples.label)
    (directory / META).write_text(json.dumps({"examples": count, "rows": list(rows)}))
    return count


def _check(paths: list[Path], directory: Path) -> None:
    """Check the files before anything is written."""
    if not paths:
        raise ValueError(f"{directory}: expected files to convert, got none")
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: expected a file to read, got none there")
        if path.resolve().parent == directory.resolve() and path.suffix == ".bin":
            raise ValueError(f"{path}: is read, and would be written over: give another --out")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="day_0.gz and so on, or plain text")
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the tables' rows")
    args = parser.parse_args()
    try:
        rows = runpy.run_path(str(CONFIG))["CONFIG"].scaled(args.scale).rows
        print(f"{convert(args.files, args.out, rows)} examples in {args.out}")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
