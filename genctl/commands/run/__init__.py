"""`genctl run` and `genctl beam`: options, job, views of texts and beams, outputs. Start with `job`."""
