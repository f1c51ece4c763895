"""`--report`: one HTML page that opens from disk, made of the events of a run."""
