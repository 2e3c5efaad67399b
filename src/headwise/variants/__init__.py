"""Published variants of attention, each a layer of its own over the same core."""
