"""How the ranks of one cache domain share a model."""
