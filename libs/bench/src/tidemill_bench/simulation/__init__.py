"""Serving fleets in simulated time: the product's own cache, index and router, with an engine that only counts."""
