"""Figures of arXiv 2505.17638."""
