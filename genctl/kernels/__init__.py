"""Matrix products in C, limited by memory bandwidth; bit-identical for any batch and any number of threads."""
