"""Show reports of a run while it goes on.

Input: where the run begins, and reports as text. Output: lines; on a terminal the reports are one
line that is rewritten.
"""

from __future__ import annotations

import sys
from typing import TextIO

import jax


class ProgressLine:
    """Shows reports: one line that is rewritten on a terminal, a line for each report elsewhere.

    Args:
      stream: to write to; None: `sys.stderr`, as it is when a report comes.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream, self._width = stream, 0

    def begin(self, text: str) -> None:
        """Say in a line of its own where the run begins; of several processes the first one does.

        Args:
          text: what is said.
        """
        if jax.process_index() == 0:
            print(text, file=self._stream or sys.stderr, flush=True)

    def show(self, line: str) -> None:
        """Show a report, `Report.line`; of several processes the first one does."""
        if jax.process_index() != 0:
            return
        stream = self._stream or sys.stderr
        if stream.isatty():
            stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            stream.write(line + "\n")
        stream.flush()

    def close(self) -> None:
        """End a line that was being rewritten."""
        if self._width:
            (self._stream or sys.stderr).write("\n")
            self._width = 0
