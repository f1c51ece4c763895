"""The forward pass of dense decoder families, in plain torch."""
