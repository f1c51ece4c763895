"""Why a row ends, tested."""
