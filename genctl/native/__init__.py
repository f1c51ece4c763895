"""Forward passes and weights of the native families, without transformers. Start with `decoder`."""
