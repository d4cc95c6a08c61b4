"""The simulator itself: runs replay, its faults are all of them played, and it is not blind."""

from __future__ import annotations
