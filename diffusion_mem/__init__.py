"""When diffusion models generalise and when they memorize (arXiv 2505.17638)."""
