"""Attention over the KV pool, behind one interface."""
