"""`genctl compare`: options, job, view and output. The entry point is `job`."""
