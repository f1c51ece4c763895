"""The panes of `genctl explore`: widgets that show values. They know no model, and send messages upwards."""
