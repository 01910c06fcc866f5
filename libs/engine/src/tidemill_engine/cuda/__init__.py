"""The CUDA backend: the same steps and the same pool layout as on the CPU, by FlashInfer, Triton and CUDA graphs."""
