"""The gateway: OpenAI HTTP and gRPC in, tokens out."""

__version__ = "0.1.0"
