"""Matrix products in C: as fast as memory allows, and the same bits for any batch and any number of threads."""
