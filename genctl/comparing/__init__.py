"""The runs of a comparison, their metrics, and recorded outputs."""
