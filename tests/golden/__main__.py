"""`python -m tests.golden NAME ...` writes golden files anew, and says what is another value now."""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings

from tests.golden.files import differences, file_of, read, write
from tests.golden.names import VALUES


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "names", nargs="+", choices=[*VALUES, "all"], metavar="NAME", help=f"{', '.join(VALUES)}, or all"
    )
    names = parser.parse_args().names
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home  # of this machine nothing is measured
        for name in VALUES if "all" in names else names:
            known = read(name) if file_of(name).exists() else {}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = VALUES[name]()
            for each in differences(known, found):
                print(f"{name}: {each}")
            write(name, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
