"""Settings of all tests."""

from __future__ import annotations

import os

# torch's stores ask the DNS for the names of both their ends: where it answers nobody, each
# question would take 5 s, here and in every process that a test starts.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
