"""`python -m ppsmoke`."""

import sys

from ppsmoke.cli import main

if __name__ == "__main__":
    sys.exit(main())
