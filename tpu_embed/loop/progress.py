"""Show reports of a run while it goes on.

Input: where the run begins, and reports. Output: a line for the first; one line that is rewritten
on a terminal for the others, elsewhere a line for each.
"""

from __future__ import annotations

import sys
from typing import TextIO

import jax

from tpu_embed.loop.reports import Report


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

    def show(self, report: Report) -> None:
        """Show a report; of several processes the first one does."""
        if jax.process_index() != 0:
            return
        stream, line = self._stream or sys.stderr, report.line()
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
