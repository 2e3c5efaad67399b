"""Heads that attend only to near and first tokens, and the cache that stores no more than that.

`localize` finds the heads, ranked by `window_effects`, and returns `StreamingHeads`. Its method `running` passes the
attention of modules (`attention_calls`) to `streaming_attention`; its method `cache` makes a `streaming_cache`.
"""
