"""How torch's CPU threads wait: importing this module, before torch, is what sets it.

OpenMP threads spin while they wait for one another. With several programs on the same cores, as when an
agent and a worker share a machine, a spinning thread takes the core from the very thread that it waits for:
docs/adr/0002 has the figures. A user's own setting wins.
"""

from __future__ import annotations

import os

# The OpenMP runtime reads its environment once, when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
