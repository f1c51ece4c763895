"""Many workers with Ray: each loads the checkpoint and decodes groups of rows; the driver writes their results."""
