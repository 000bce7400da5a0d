"""Where arrivals come from."""
