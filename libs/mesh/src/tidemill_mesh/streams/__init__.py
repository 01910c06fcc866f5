"""gRPC's bidirectional streams on the event loop itself: HTTP/2 without a thread between the socket and its handler."""
