"""Workers of a Ray cluster: each loads the checkpoint, and decodes or scores groups of rows."""
