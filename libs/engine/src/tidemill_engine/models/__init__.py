"""Model architectures, chosen by the name in config.json."""
