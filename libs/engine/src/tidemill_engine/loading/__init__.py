"""From a checkpoint folder to named tensors; also makes the folders that tests and first runs use."""
