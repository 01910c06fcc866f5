"""The models that the mesh serves: cards, tokenizers and templates, fetched by digest from any worker."""
