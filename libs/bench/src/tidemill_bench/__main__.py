"""`python -m tidemill_bench NAME`: runs one benchmark, prints its table, writes its JSON."""

import argparse
import importlib
import sys
from pathlib import Path

from tidemill_bench import benchmarks
from tidemill_bench.options import Options
from tidemill_bench.report import read, table, with_part, write

NAMES = sorted(path.stem for path in Path(benchmarks.__path__[0]).glob("[a-z]*.py"))


def main() -> int:
    """Runs the named benchmark."""
    parser = argparse.ArgumentParser(prog="tidemill_bench", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--home", type=Path, default=Path(".tidemill"), help="folder of state and caches")
    parser.add_argument("--results", type=Path, default=Path("bench/results"), help="folder of the JSON files")
    parser.add_argument("--peers", type=Path, default=None, help="virtual environment made by bench/deps.sh")
    parser.add_argument("--traces", type=Path, default=None, help="folder of traces; default: those of bench/deps.sh")
    parser.add_argument("--engine", choices=("simulated", "real"), default="simulated", help="where there is a choice")
    parser.add_argument("--part", default="", help="only these rows, added to the file that a whole run wrote")
    parser.add_argument("--quick", action="store_true", help="one short round, to see that it runs")
    arguments = parser.parse_args()
    home: Path = arguments.home.absolute()
    peers = (arguments.peers or home / "peers").absolute()
    traces = (arguments.traces or peers / "traces").absolute()
    options = Options(
        home=home,
        peers=peers,
        quick=arguments.quick,
        traces=traces,
        engine=arguments.engine,
        part=arguments.part,
    )
    module = importlib.import_module(f"tidemill_bench.benchmarks.{arguments.name}")
    if options.part not in getattr(module, "PARTS", ("",)):
        parser.error(f"{arguments.name} has no part {options.part!r}")
    rows = module.run(options)
    print(table(rows))
    name = arguments.name if arguments.engine == "simulated" else f"{arguments.name}_{arguments.engine}"
    if options.part:
        rows = with_part(read(name, arguments.results), rows)
    print(f"\nwritten to {write(name, rows, arguments.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
