"""What a checkpoint can be refused for."""


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded; the message names the file, tensor or configuration key."""
