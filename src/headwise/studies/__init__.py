"""Studies of the number of heads: small models with different heads, trained on the same data and compared."""
