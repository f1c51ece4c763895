"""`genctl inspect-cache`: options, job, measurements, predictions and their reports. Enter by `job`."""
