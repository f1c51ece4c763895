"""Events in, marks out: what a person sees of a run. Never torch."""
