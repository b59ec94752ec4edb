"""`python -m specpilot_cli` is `specpilot`."""

import sys

from specpilot_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
