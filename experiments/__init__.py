"""One file per paper figure or table, and the programs that run them."""
