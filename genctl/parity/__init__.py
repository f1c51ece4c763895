"""Two ways of running a model, compared at every token: how far apart, where first, and whose fault it is."""
