"""A decoding step on a GPU, in Triton."""
