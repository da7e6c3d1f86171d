"""Contrastive goal-conditioned RL with very deep networks (arXiv 2503.14858)."""
