"""The life of a request on the workers: placed, prefilled, handed over, decoded, and started again after a loss."""
