"""`genctl chat`: a conversation with a checkpoint or a server."""
