"""Makes the typed Python stubs of proto/ inside libs/client (`make stubs`)."""

import shutil
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).resolve().parent
TARGET = PROTO.parent / "libs" / "client" / "src" / "tidemill"
PACKAGES = {
    "v1": "Generated stubs of the public contract.",
    "mesh": "Generated stubs of the internal contracts.",
    "mesh/v1": "Generated stubs of the internal contracts, version 1.",
}


def main() -> int:
    """Generates aside and swaps files in one by one, so that a running reader never misses a module."""
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    with tempfile.TemporaryDirectory(dir=TARGET.parent) as folder:
        outputs = [f"--{kind}_out={folder}" for kind in ("python", "grpc_python")]
        outputs += [f"--{kind}_out=quiet:{folder}" for kind in ("mypy", "mypy_grpc")]
        status = int(protoc.main(["protoc", f"-I{PROTO}", *outputs, *sources]))
        if status:
            return status
        for package, docstring in PACKAGES.items():
            _swap_in(Path(folder) / "tidemill" / package, TARGET / package, docstring)
    return 0


def _swap_in(made: Path, target: Path, docstring: str) -> None:
    (made / "__init__.py").write_text(f'"""{docstring}"""\n')
    target.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in made.iterdir() if path.is_file()}
    for name in sorted(names):
        (made / name).replace(target / name)
    for stale in target.iterdir():
        if stale.is_file() and stale.name not in names:
            stale.unlink()
    shutil.rmtree(target / "__pycache__", ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
