"""Files: written completely or not at all, and checked when they are read."""
