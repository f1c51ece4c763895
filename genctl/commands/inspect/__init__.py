"""`genctl inspect-cache`: options, job, measurements, plans and their reports. The entry point is `job`."""
