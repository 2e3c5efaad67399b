"""Heads that attend only to near and first tokens, and the cache that stores no more than that.

`localize` finds the heads, ranked by `WindowEffects`, and returns `StreamingHeads`. Its method `running` lets
`streaming_attention` compute the attention of modules; its method `cache` makes a `streaming_cache`.
"""
