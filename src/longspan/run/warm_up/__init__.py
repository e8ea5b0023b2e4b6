"""Before step 1: each kind of work of coming plans runs once, so that no step waits for a compiler or a driver."""
