"""``python -m cloud_worker``."""

from __future__ import annotations

import sys

from cloud_worker.cli import main

if __name__ == "__main__":
    sys.exit(main())
