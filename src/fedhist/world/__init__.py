"""Who is fast, who is there, who attacks and what breaks, and the clock that turns it into arrivals."""
