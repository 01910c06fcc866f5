"""The contracts of Tidemill and the client that embedders use."""

__version__ = "0.1.0"
