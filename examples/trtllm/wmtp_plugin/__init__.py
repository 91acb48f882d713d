"""For ``trtllm-serve --custom_module_dirs examples/trtllm/wmtp_plugin``: registers the models.

TensorRT-LLM imports this folder as a package, in the server and in each of its workers.
"""

import tllm_wmtp.trtllm.plugin  # noqa: F401
