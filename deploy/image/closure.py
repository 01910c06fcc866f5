"""Prints the folders of a distribution and of those of ours that it needs: closure.py DISTRIBUTION[EXTRA] ...

Every one of them is then installed by its folder, so that none is ever looked for in a package index.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def folders() -> dict[str, Path]:
    """Folder by distribution."""
    found = {}
    for path in [*ROOT.glob("libs/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")]:
        found[tomllib.loads(path.read_text())["project"]["name"]] = path.parent
    return found


def needs(folder: Path) -> list[str]:
    """Distributions that a folder's project depends on."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return [match.group() for text in project["dependencies"] if (match := re.match(r"[A-Za-z0-9._-]+", text))]


def closure(wanted: list[str], known: dict[str, Path]) -> list[str]:
    """All of ours that are needed, dependencies first."""
    done: list[str] = []

    def visit(name: str) -> None:
        if name in known and name not in done:
            for needed in needs(known[name]):
                visit(needed)
            done.append(name)

    for name in wanted:
        visit(name)
    return done


def main() -> int:
    """Prints one folder a word, extras kept."""
    extras = {text.partition("[")[0]: text.partition("[")[1] + text.partition("[")[2] for text in sys.argv[1:]}
    known = folders()
    unknown = [name for name in extras if name not in known]
    if unknown:
        print(f"no such distribution: {', '.join(unknown)}", file=sys.stderr)
        return 2
    print(" ".join(f"{known[name]}{extras.get(name, '')}" for name in closure(list(extras), known)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
