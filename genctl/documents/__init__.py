"""Documents that come back: files and streams of a bounded size, strict JSON, and values of known shapes."""
