"""Limits of tenants, shared by all gateways of a mesh."""
