"""A stand-in for TensorRT-LLM: its names and signatures, in two layouts, over a toy of a model.

``early`` is laid out like the 1.3 line, ``late`` like what followed. What a class does here was
written for these tests; it shows what the plug-in makes of the calls, not what TensorRT-LLM does.
:mod:`.package` writes a ``tensorrt_llm`` of either layout to disk.
"""
