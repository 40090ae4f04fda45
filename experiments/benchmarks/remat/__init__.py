"""What rematerialisation buys: the time of a train step against the memory that it needs, and the largest batch."""
