"""Other systems that benchmarks run beside ours."""
