"""__main__: `python -m a2a` is the command line."""

from __future__ import annotations

import sys

from a2a.cli import main

if __name__ == "__main__":
    sys.exit(main())
