"""The cache of keys and values: its layers, in every form, and the rows that they hold."""
