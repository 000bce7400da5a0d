"""The clock, the devices it models, and the loop that runs over it."""
