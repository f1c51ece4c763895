"""The decode core. Read `types`, then `loop`, `scheduler`, `lane`, `batch`, `choose` and `commit`, in this order."""
