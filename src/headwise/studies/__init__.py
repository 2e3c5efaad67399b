"""How many heads, and how wide: trained, compared, told with the spread over seeds."""
