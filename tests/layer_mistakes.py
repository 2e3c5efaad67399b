"""Unusable options that every attention layer refuses, each with the message of its error."""

import torch

MISTAKES_OF_EVERY_LAYER = [
    ({"num_heads": 0}, "num_heads: expected a whole number of 1 or more, got 0"),
    ({"value_dim": 0}, "value_dim: expected a whole number of 1 or more, got 0"),
    ({"rotary": 10_000}, r"rotary: expected a Rotary, such as Rotary\(theta=10_000\), got int"),
    ({"mask": torch.ones(2, 2)}, r"mask: expected a headwise Mask, such as causal\(\), got Tensor"),
    ({"scores": {"softcap": 3.0}}, r"scores: expected a Scores, such as Scores\(softcap=30.0\), got dict"),
    ({"dropout": 1.0}, "dropout: expected a probability of 0 or more and less than 1, got 1.0"),
    ({"backend": "flash"}, "backend: expected one of fused, flex, blockwise, native, reference, got 'flash'"),
    ({"bias": "False"}, "bias: expected True or False, got 'False'"),
    ({"out_bias": "no"}, "out_bias: expected True or False, got 'no'"),
    ({"dtype": "float16"}, "dtype: expected a floating-point dtype, such as torch.float16, got 'float16'"),
    ({"embed_dim": None}, "embed_dim: expected a whole number of 1 or more, got None"),
    ({"num_heads": None}, "num_heads: expected a whole number of 1 or more, got None"),
    ({"head_dim": 2**63}, "head_dim: expected a whole number from 1 to 2147483648, got 9223372036854775808"),
]
