"""A real cluster: two raylets on loopback, which share nothing but this machine."""
