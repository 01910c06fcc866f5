"""One worker's engine: scheduler, model runner, attention, layers, models, sampling."""

__version__ = "0.1.0"
