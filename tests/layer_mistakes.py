"""Unusable options that every attention layer refuses, each with the message of its error."""

MISTAKES_OF_EVERY_LAYER = [
    ({"bias": "False"}, "bias: expected True or False, got 'False'"),
    ({"out_bias": "no"}, "out_bias: expected True or False, got 'no'"),
    ({"dtype": "float16"}, "dtype: expected a floating-point dtype, such as torch.float16, got 'float16'"),
    ({"embed_dim": None}, "embed_dim: expected a whole number of 1 or more, got None"),
    ({"num_heads": None}, "num_heads: expected a whole number of 1 or more, got None"),
    ({"head_dim": 2**63}, "head_dim: expected a whole number from 1 to 2147483648, got 9223372036854775808"),
]
