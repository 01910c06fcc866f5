"""Makes the typed Python stubs of proto/ inside libs/client (`make stubs`)."""

import shutil
import sys
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent
TARGET = PROTO.parent / "libs" / "client" / "src"
PACKAGES = {
    "tidemill/v1": "Generated stubs of the public contract.",
    "tidemill/mesh": "Generated stubs of the internal contracts.",
    "tidemill/mesh/v1": "Generated stubs of the internal contracts, version 1.",
}


def main() -> int:
    """Generates into a clean folder; returns protoc's exit status."""
    for package in PACKAGES:
        shutil.rmtree(TARGET / package, ignore_errors=True)
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    outputs = [f"--{kind}_out={TARGET}" for kind in ("python", "grpc_python")]
    outputs += [f"--{kind}_out=quiet:{TARGET}" for kind in ("mypy", "mypy_grpc")]
    status = protoc.main(["protoc", f"-I{PROTO}", *outputs, *sources])
    for package, docstring in PACKAGES.items():
        (TARGET / package / "__init__.py").write_text(f'"""{docstring}"""\n')
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
