"""`genctl compare`: options, job, view, report, recordings of `--save` and `--expect`. Enter by `job`."""
