"""`genctl score`: options, job, and its table of tokens. Enter by `job`."""
