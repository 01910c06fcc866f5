"""The benchmarks: each module has `run(options) -> list[Row]`."""
