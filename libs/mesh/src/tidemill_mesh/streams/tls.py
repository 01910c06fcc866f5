"""TLS of the streams, by the same settings and rules as gRPC's own channels and servers."""

import ssl

from tidemill_mesh.config import ServiceSettings

PROTOCOLS = ["h2"]


def client_tls(settings: ServiceSettings) -> ssl.SSLContext | None:
    """None: in the clear; a certificate or an authority in the settings means TLS."""
    if not (settings.tls_cert or settings.tls_ca):
        return None
    context = ssl.create_default_context(cafile=settings.tls_ca or None)
    if settings.tls_cert:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    context.set_alpn_protocols(PROTOCOLS)
    return context


def server_tls(settings: ServiceSettings) -> ssl.SSLContext | None:
    """None: in the clear; with an authority, clients must present a certificate."""
    if not settings.tls_cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=settings.tls_ca or None)
    context.load_cert_chain(settings.tls_cert, settings.tls_key)
    if settings.tls_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(PROTOCOLS)
    return context
