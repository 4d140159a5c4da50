"""What every test runs under, also when pytest is called without make."""

from __future__ import annotations

import os

# Read by torch and transformers when they are imported, and handed on to every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
