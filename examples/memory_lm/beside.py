"""Importing this lets a program of this folder import what the examples beside it share."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
