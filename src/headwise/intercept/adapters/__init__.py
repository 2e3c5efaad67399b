"""Adapters: each file reads the calls of one attention function, or of one library such as FlashAttention, as an
`AttentionCall`. `all_adapters.py` lists them, and `answer.py` of the folder above answers the calls.

Nothing is imported from other libraries: their functions are looked up among the loaded modules while a model is
intercepted.
"""
