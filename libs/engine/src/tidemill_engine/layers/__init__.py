"""Building blocks of models: matrices in their weight formats, norms, rotary embedding."""
