"""Shows the events of a run on the terminal. Never imports torch."""
