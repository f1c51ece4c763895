"""The outputs of a comparison's runs, their metrics and statistics, and references."""
