"""Where tokens are computed: in this process, on servers, by workers, or by ranks that share one model."""
