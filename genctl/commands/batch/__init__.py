"""`genctl batch`: files of requests and of answers, as servers take and give them. Enter by `jobs`."""
