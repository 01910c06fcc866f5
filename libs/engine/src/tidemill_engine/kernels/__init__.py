"""CPU kernels in C, compiled for the machine they run on at the first start."""
