"""`python -m meshloom` is the command line."""

import sys

from meshloom.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
