"""Checks proto/: buf's lint, and that nothing breaks the contract in released.txtpb (`make proto-breaking`).

The public contract (tidemill/v1) may never break, with --strict the internal one (tidemill/mesh) neither.
At each release: `python proto/check.py --release` writes the new released.txtpb.
"""

import argparse
import subprocess
import sys
import sysconfig
from pathlib import Path

PROTO = Path(__file__).resolve().parent
RELEASED = PROTO / "released.txtpb"
BUF = Path(sysconfig.get_path("scripts")) / "buf"


def buf(*arguments: str) -> int:
    """Runs buf in proto/; its exit status."""
    return subprocess.run([str(BUF), *arguments], cwd=PROTO, check=False).returncode


def breaking(*paths: str) -> int:
    """Compares today's files, or those under the paths, with the released ones."""
    chosen = [argument for path in paths for argument in ("--path", path)]
    return buf("breaking", ".", "--against", RELEASED.name, *chosen)


def main() -> int:
    """Checks, or writes the released image; 0 when all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strict", action="store_true", help="the internal contract may not break either")
    parser.add_argument("--release", action="store_true", help="write released.txtpb from today's files")
    chosen = parser.parse_args()
    if chosen.release:
        return buf("build", ".", "--exclude-source-info", "-o", RELEASED.name)
    failed = buf("lint", ".")
    failed |= breaking() if chosen.strict else breaking("tidemill/v1")
    if not chosen.strict and breaking("tidemill/mesh"):
        print("proto: the internal contract differs from the released one (allowed without --strict)")
    return failed


if __name__ == "__main__":
    sys.exit(main())
