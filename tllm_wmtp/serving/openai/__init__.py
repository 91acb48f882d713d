"""An HTTP server with OpenAI's interface, around one :class:`tllm_wmtp.LLM`; ``wmtp serve``.

Its modules need the optional extra ``serve``; importing this package does not.
"""
