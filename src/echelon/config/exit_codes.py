"""Exit codes with a meaning of their own."""

from __future__ import annotations

SAVED_AND_STOPPED = 75
"""The run was told to stop, and wrote a last checkpoint: EX_TEMPFAIL of sysexits.h, try again later."""
