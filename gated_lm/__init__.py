"""Decoder language models with gated attention (arXiv 2505.06708)."""
