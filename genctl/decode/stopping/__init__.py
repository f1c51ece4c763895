"""Why a row ends, and where its text is cut. `build` makes the criteria of a lane; `stops` cuts."""
